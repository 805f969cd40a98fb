"""The closed loop against cases with known answers and against the dense reference loop."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.fixtures import (
    EOS_ID,
    make_context_drafter,
    make_cycle_target,
    make_fixed_drafter,
    make_fixed_target,
    make_half_drafter,
    make_layered_target,
    make_perfect_drafter,
    make_rand_target,
    make_random_drafter,
    make_wrong_drafter,
    orbit_prompt,
)
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget, reference_loop

from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.source import load_model
from outrider.train.evaluate import ClosedLoop, closed_loop


def _loop(
    target: Path,
    drafter: Path,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    stop_ids: tuple[int, ...] = (EOS_ID,),
    batch: int = 16,
) -> ClosedLoop:
    loaded = load_model(str(target))
    model = load_drafter(
        drafter,
        target_config=loaded.config,
        embed_weight=loaded.model.embed_tokens.weight,
        lm_head_weight=loaded.model.lm_head.weight,
    ).model
    return closed_loop(
        loaded.model,
        model,
        prompts,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        seed=1,
        batch=batch,
    )


def test_known_accepted_lengths(tmp_path: Path) -> None:
    target = make_cycle_target(tmp_path / "target")
    prompts = [orbit_prompt(length) for length in (1, 16, 40)]
    for make, rounds, length in ((make_perfect_drafter, 8, 8), (make_half_drafter, 16, 4), (make_wrong_drafter, 64, 1)):
        totals = _loop(target, make(tmp_path / make.__name__), prompts, max_tokens=65)
        assert totals.rounds == 3 * rounds
        assert totals.accepted_length == length


def test_context_drafter_sees_every_position_below_the_anchor(tmp_path: Path) -> None:
    target, drafter = make_layered_target(tmp_path / "target"), make_context_drafter(tmp_path / "drafter")
    totals = _loop(target, drafter, [orbit_prompt(length) for length in (8, 40, 200)], max_tokens=65)
    assert totals.accepted_length == 8


@pytest.mark.parametrize("head_type", ["vanilla", "gated", "rnn"])
def test_equals_dense_reference_loop(tmp_path: Path, head_type: str) -> None:
    target = make_rand_target(tmp_path / "target")
    drafter = make_random_drafter(tmp_path / "drafter", markov_head_type=head_type)
    reference_target = ReferenceTarget(target)
    reference_drafter = ReferenceDrafter.load(drafter, reference_target)
    prompts = [[5, 6, 7], [9] * 20]
    expected = [
        reference_loop(reference_target, reference_drafter, prompt, max_tokens=12, gamma=7) for prompt in prompts
    ]
    totals = _loop(target, drafter, prompts, max_tokens=12, stop_ids=())
    assert totals.outputs == [run.token_ids for run in expected]
    assert totals.accepted == [sum(run.accepted.count(n) for run in expected) for n in range(8)]


def test_end_token_inside_an_accepted_run_ends_the_request(tmp_path: Path) -> None:
    target, drafter = make_cycle_target(tmp_path / "target"), make_perfect_drafter(tmp_path / "drafter")
    prompt = orbit_prompt(4)
    endless = _loop(target, drafter, [prompt], max_tokens=30).outputs[0]
    totals = _loop(target, drafter, [prompt], max_tokens=30, stop_ids=(endless[5],))
    assert totals.outputs[0] == endless[:6]
    assert (totals.rounds, totals.emitted) == (1, 5)  # the first token came from prefill


def test_sampled_tokens_have_the_targets_distribution(tmp_path: Path) -> None:
    """p = (.10, .60, .30), q = (.45, .10, .45): chi-square of positions 1-3 and of the joint of 1 and 2."""
    p = {0: 0.10, 1: 0.60, 2: 0.30}
    target = make_fixed_target(tmp_path / "target", probabilities=p)
    drafter = make_fixed_drafter(tmp_path / "drafter", probabilities={0: 0.45, 1: 0.10, 2: 0.45})
    runs = 1200
    totals = _loop(target, drafter, [[3, 4]] * runs, max_tokens=4, temperature=1.0, batch=runs)
    assert totals.rounds < 3 * runs  # some drafts were accepted
    for position in (1, 2, 3):
        counts = Counter(tokens[position] for tokens in totals.outputs)
        assert _chi_square(counts, p, runs) < 13.8  # two degrees of freedom, p = 1e-3
    pairs = Counter(3 * tokens[1] + tokens[2] for tokens in totals.outputs)
    joint = {3 * a + b: p[a] * p[b] for a in p for b in p}
    assert _chi_square(pairs, joint, runs) < 26.1  # eight degrees of freedom


def _chi_square(counts: Counter[int], expected: dict[int, float], total: int) -> float:
    assert set(counts) <= set(expected)
    shares = torch.tensor([expected[key] * total for key in expected])
    observed = torch.tensor([float(counts[key]) for key in expected])
    return float(((observed - shares) ** 2 / shares).sum())
