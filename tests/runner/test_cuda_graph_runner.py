"""The bookkeeping of captured graphs, over a graph that runs the forward again instead of recorded kernels."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import pytest
import torch
from tests.runner.eager_graph import EagerGraph
from tests.runner.test_batch_builder import CPU, WIDTHS, builder, decode_plan, draft_rows, find, verify_rows
from tests.runner.test_static_runner import TIER, draft_inputs
from torch import Tensor

from outrider.batch.counts import RequestCount
from outrider.batch.forward_batch import DrafterInputs, TargetInputs
from outrider.batch.step_plan import PassKind, plan_capture
from outrider.errors import ConfigError
from outrider.runner.cuda_graph_runner import CudaGraphRunner
from outrider.runner.graph_runner import EagerRunner, GraphKey
from outrider.runner.static_inputs import flatten


@dataclass(frozen=True, slots=True)
class Sums:
    ids_N: Tensor
    tables_R: Tensor


def target_forward(inputs: TargetInputs) -> Sums:
    return Sums(inputs.token_ids_N * 3 + inputs.positions_N, inputs.metadata.block_tables_RB.sum(dim=1))


def drafter_forward(inputs: DrafterInputs) -> Tensor:
    return inputs.anchor_ids_R * 5 + inputs.metadata.context_lens_R


def captured(tiers: tuple[int, ...]) -> CudaGraphRunner:
    runner = CudaGraphRunner(tiers, device=CPU, new_graph=EagerGraph)
    for tier in reversed(tiers):
        plan = plan_capture(PassKind.VERIFY, tier=tier, widths=WIDTHS, num_ranks=1)
        runner.capture(GraphKey.of(plan, 0), builder().verify(plan, []).inputs, target_forward)
        plan = plan_capture(PassKind.DRAFT, tier=tier, widths=WIDTHS, num_ranks=1)
        runner.capture(GraphKey.of(plan, 0), builder().draft(plan, []).inputs, drafter_forward)
    return runner


def test_random_counts_give_what_an_eager_run_of_the_padded_batch_gives() -> None:
    """Both models in turn, tiers in any order: each replay sees its own step's inputs and touches no other key's."""
    runner, draw = captured((1, 2, 4, 5)), random.Random(0)
    counts = [draw.randint(1, 5) for _ in range(60)]
    for count in counts:
        plan = decode_plan([count], tiers=runner.tiers)
        draft = builder().draft(find(plan, PassKind.DRAFT), draft_rows(count))
        verify = builder().verify(find(plan, PassKind.VERIFY), verify_rows(count))
        ids = runner.run(GraphKey.of(draft.plan, 0), draft.inputs, drafter_forward)
        sums = runner.run(GraphKey.of(verify.plan, 0), verify.inputs, target_forward)
        expected = target_forward(verify.inputs)
        assert torch.equal(ids, drafter_forward(draft.inputs)), "the draft's outputs did not outlive the verify pass"
        assert torch.equal(sums.ids_N, expected.ids_N)
        assert torch.equal(sums.tables_R, expected.tables_R)
    assert runner.num_replays == 2 * len(counts)
    assert len(runner.captured_keys) == 8


def test_a_replay_overwrites_the_captured_outputs_and_runs_what_was_captured() -> None:
    runner = captured((TIER,))
    plan = find(decode_plan([2], tiers=(TIER,)), PassKind.DRAFT)
    key = GraphKey.of(plan, 0)

    def never(_: DrafterInputs) -> Tensor:
        raise AssertionError("a replay does not run the caller's forward")

    first = runner.run(key, draft_inputs(2), never)
    before = first.clone()
    second = runner.run(key, draft_inputs(3), never)
    assert second is first, "outputs have no place of their own"
    assert not torch.equal(first, before)
    assert torch.equal(second, drafter_forward(draft_inputs(3)))


def test_inputs_that_differ_from_the_captured_ones_are_errors_before_any_replay() -> None:
    runner = captured((TIER,))
    key = GraphKey.of(find(decode_plan([2], tiers=(TIER,)), PassKind.DRAFT), 0)
    wider = dataclasses.replace(draft_inputs(2), anchor_ids_R=torch.zeros(TIER + 1, dtype=torch.int64))
    with pytest.raises(AssertionError, match="anchor_ids_R"):
        runner.run(key, wider, drafter_forward)
    assert runner.num_replays == 0


def test_keys_are_captured_once_and_only_of_the_tiers() -> None:
    runner = captured((TIER,))
    key = GraphKey.of(find(decode_plan([2], tiers=(TIER,)), PassKind.DRAFT), 0)
    with pytest.raises(AssertionError, match="captured already"):
        runner.capture(key, draft_inputs(2), drafter_forward)
    other = dataclasses.replace(key, requests=RequestCount(3))
    with pytest.raises(AssertionError, match="is of no tier"):
        runner.capture(other, draft_inputs(2), drafter_forward)
    with pytest.raises(AssertionError, match="was not captured"):
        runner.run(other, draft_inputs(2), drafter_forward)


def test_without_a_tier_it_runs_what_comes() -> None:
    runner = captured((TIER,))
    plan = find(decode_plan([2], tiers=()), PassKind.DRAFT)
    batch = builder().draft(plan, draft_rows(2))
    found = runner.run(GraphKey.of(plan, 0), batch.inputs, drafter_forward)
    assert torch.equal(found, EagerRunner().run(GraphKey.of(plan, 0), batch.inputs, drafter_forward))
    assert runner.num_replays == 0


def test_static_bytes_are_the_buffers_and_the_graphs() -> None:
    class Heavy(EagerGraph):
        num_bytes = 1000

    runner = CudaGraphRunner((TIER,), device=CPU, new_graph=Heavy)
    plan = find(decode_plan([2], tiers=(TIER,)), PassKind.DRAFT)
    runner.capture(GraphKey.of(plan, 0), draft_inputs(2), drafter_forward)
    buffers = sum(x.numel() * x.element_size() for x in flatten(draft_inputs(2))[0].values())
    assert runner.static_bytes == buffers + 1000


def test_recording_is_refused_by_name_where_there_is_no_cuda_device() -> None:
    with pytest.raises(ConfigError, match=r"device='cpu' is none"):
        CudaGraphRunner((TIER,), device=CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"device='cuda' is absent"):
            CudaGraphRunner((TIER,), device=torch.device("cuda"))
