"""The self-test at load: draft a few known prompts and hold the accepted length against the figure on the card.

A drafter that was loaded wrongly (a tensor dropped, features of the wrong layer, context shifted by one) still gives
right text, only slowly; this is where it is noticed. A result below the floor is a warning, not an error: the text is
the target's all the same.
"""

from __future__ import annotations

from outrider.engine.engine_core import EngineCore
from outrider.errors import CheckpointError, InvalidRequestError
from outrider.logger import get_logger
from outrider.models.drafter_card import DrafterCard
from outrider.sampling_params import SamplingParams

logger = get_logger(__name__)


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
    # More at a time would be decoded without drafts.
    together = core.config.speculative_disable_by_batch_size or len(test.prompts)

    def has_room() -> bool:
        stats = core.stats()  # a queue may be shorter than the card
        return stats.num_waiting < core.config.max_num_waiting and stats.num_waiting + stats.num_running < together

    prompts = [p for p in test.prompts if len(p) + test.max_tokens <= core.config.max_model_len]
    pending = list(enumerate(prompts))
    running = True
    while running:  # until no rank has any left, so that all of them take as many steps
        while pending and has_room():
            index, prompt = pending.pop(0)
            try:
                core.add_request(request_id=f"self-test-{index}", prompt=None, prompt_token_ids=prompt, params=params)
            except InvalidRequestError as error:
                raise CheckpointError(f"drafter card: selftest.prompts does not fit the target: {error}") from error
        core.step()
        running = bool(pending) or not core.agreement.all_idle
    measured = core.stats().spec.accepted_length
    if not prompts:
        logger.info("drafter self-test: none of its prompts fits max_model_len=%d; not run", core.config.max_model_len)
    elif measured < test.floor:
        logger.warning(
            "drafter self-test: accepted length %.2f is below the floor %.2f (the card says %.2f): the drafter or its "
            "inputs are wrong; text stays the target's, but decoding is slower than it should be "
            "(num_speculative_tokens=%d)",
            measured, test.floor, test.accepted_length, gamma,
        )  # fmt: skip
    else:
        logger.info("drafter self-test: accepted length %.2f (the card says %.2f)", measured, test.accepted_length)
    return measured
