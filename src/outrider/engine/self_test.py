"""The self-test at load: draft a few known prompts and hold the accepted length against the figure on the card.

A drafter that was loaded wrongly (a tensor dropped, features of the wrong layer, context shifted by one) still gives
right text, only slowly; this is where it is noticed. A result below the floor is a warning, not an error: the text is
the target's all the same.

The test ends early where a drafter is clearly above the floor. A warning is given after all of it only, so ending early
makes none likelier.
"""

from __future__ import annotations

import math

from outrider.engine.engine_core import EngineCore
from outrider.errors import CheckpointError, InvalidRequestError
from outrider.logger import get_logger
from outrider.models.drafter_card import DrafterCard
from outrider.outputs import SpecCounters
from outrider.sampling_params import SamplingParams

logger = get_logger(__name__)

_LEAST_ROUNDS = 24
_STANDARD_ERRORS = 3.0


def run_self_test(core: EngineCore, card: DrafterCard, *, num_speculative_tokens: int) -> float:
    """Accepted length over the card's prompts, greedily decoded; 0.0 if the card has no test or it cannot be run.

    The card's figure holds for the drafter's whole block of ``num_speculative_tokens``, all of it verified; where the
    engine drafts or verifies less there is nothing to hold it against.

    ``core`` is used up by this: its counters and prefix cache hold the test's.
    """
    test = card.selftest
    if test is None:
        return 0.0
    gamma, threshold = core.config.num_speculative_tokens, core.config.draft_confidence_threshold
    if gamma < num_speculative_tokens or threshold > 0.0:
        logger.info(
            "drafter self-test: not run with num_speculative_tokens=%d of %d and draft_confidence_threshold=%g",
            gamma, num_speculative_tokens, threshold,
        )  # fmt: skip
        return 0.0
    params = SamplingParams(temperature=0.0, max_tokens=test.max_tokens, ignore_eos=True)
    prompts = [p for p in test.prompts if len(p) + test.max_tokens <= core.config.max_model_len]
    pending = list(enumerate(prompts))
    running = True
    while running:  # until no rank has any left, so that all of them take as many steps
        while pending and core.stats().num_waiting < core.config.max_num_waiting:  # a queue shorter than the card
            index, prompt = pending.pop(0)
            try:
                core.add_request(request_id=f"self-test-{index}", prompt=None, prompt_token_ids=prompt, params=params)
            except InvalidRequestError as error:
                raise CheckpointError(f"drafter card: selftest.prompts does not fit the target: {error}") from error
        core.step()
        if _is_clear(core.stats().spec, test.floor):  # each rank by itself: one without requests goes on as an idle one
            for index in range(len(prompts)):
                core.abort(f"self-test-{index}")
            pending.clear()
        running = bool(pending) or not core.agreement.all_idle
    spec = core.stats().spec
    measured = spec.accepted_length
    if not prompts:
        logger.info("drafter self-test: none of its prompts fits max_model_len=%d; not run", core.config.max_model_len)
    elif measured < test.floor:
        logger.warning(
            "drafter self-test: accepted length %.2f is below the floor %.2f (the card says %.2f): the drafter or its "
            "inputs are wrong; text stays the target's, but decoding is slower than it should be "
            "(num_speculative_tokens=%d)",
            measured, test.floor, test.accepted_length, gamma,
        )  # fmt: skip
    elif _is_clear(spec, test.floor):
        logger.info(
            "drafter self-test: accepted length %.2f in the first %d rounds, clearly above the floor %.2f",
            measured, spec.rounds, test.floor,
        )  # fmt: skip
    else:
        logger.info("drafter self-test: accepted length %.2f (the card says %.2f)", measured, test.accepted_length)
    return measured


def _is_clear(spec: SpecCounters, floor: float) -> bool:
    """Enough rounds, and their mean above ``floor`` by several standard errors.

    A round's accepted drafts are a prefix of the block, so that the counts by position give the variance: the sum of
    squares of a count is that of 2k - 1 over the positions k up to it.
    """
    if spec.rounds < _LEAST_ROUNDS:
        return False
    squares = sum((2 * k - 1) * accepted for k, (_, accepted) in enumerate(spec.per_position, start=1))
    variance = max(squares / spec.rounds - (spec.accepted / spec.rounds) ** 2, 0.0)
    return spec.accepted_length - _STANDARD_ERRORS * math.sqrt(variance / spec.rounds) > floor
