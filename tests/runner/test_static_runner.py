"""Static buffers: every tensor refreshed by name, every mismatch an error, every reachable key captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.runner.test_batch_builder import GAMMA, WIDTHS, builder, decode_plan, draft_rows, find, verify_rows
from torch import Tensor

from outrider.batch.counts import PaddedTokenCount, RequestCount
from outrider.batch.forward_batch import DrafterInputs, PassInputs, TargetInputs
from outrider.batch.step_plan import PassKind, PassWidths, plan_capture
from outrider.batch.tiers import capture_sizes
from outrider.runner.graph_runner import GraphKey, StaticRunner
from outrider.runner.reachable import EAGER_WITH_TIERS, EAGER_WITHOUT_TIERS, prove_captured, reachable_keys
from outrider.runner.static_inputs import StaticInputs, flatten

TIER = 4
TARGET_TENSORS = {
    "token_ids_N",
    "positions_N",
    "metadata.query_start_loc_R1",
    "metadata.seq_lens_R",
    "metadata.block_tables_RB",
    "metadata.slot_mapping_N",
    "experts.num_tokens_non_padded",
}
DRAFTER_TENSORS = {
    "anchor_ids_R",
    "anchor_positions_R",
    "metadata.context_lens_R",
    "metadata.block_tables_RB",
    "experts.num_tokens_non_padded",
}


def verify_inputs(count: int) -> TargetInputs:
    return builder().verify(find(decode_plan([count], tiers=(TIER,)), PassKind.VERIFY), verify_rows(count)).inputs


def draft_inputs(count: int) -> DrafterInputs:
    return builder().draft(find(decode_plan([count], tiers=(TIER,)), PassKind.DRAFT), draft_rows(count)).inputs


def captured_target() -> StaticInputs:
    plan = plan_capture(PassKind.VERIFY, tier=TIER, widths=WIDTHS, num_ranks=1)
    return StaticInputs(builder().verify(plan, []).inputs)


def captured_drafter() -> StaticInputs:
    plan = plan_capture(PassKind.DRAFT, tier=TIER, widths=WIDTHS, num_ranks=1)
    return StaticInputs(builder().draft(plan, []).inputs)


def with_tensor(inputs: PassInputs, name: str, value: Any) -> Any:
    """``inputs`` with one field, dotted where nested, replaced."""
    outer, _, inner = name.partition(".")
    if inner:
        value = dataclasses.replace(getattr(inputs, outer), **{inner: value})
    changes: dict[str, Any] = {outer: value}
    return dataclasses.replace(inputs, **changes)


def test_every_dynamic_tensor_is_registered_by_name() -> None:
    assert set(flatten(verify_inputs(1))[0]) == TARGET_TENSORS
    assert set(flatten(draft_inputs(1))[0]) == DRAFTER_TENSORS


@pytest.mark.parametrize("make", [verify_inputs, draft_inputs], ids=["target", "drafter"])
def test_a_replay_sees_this_steps_contents_in_the_captured_buffers(make: Any) -> None:
    """Three steps of different loads: contents are the step's, storage is the capture's, the batch is left alone."""
    static = captured_target() if make is verify_inputs else captured_drafter()
    addresses: dict[str, int] = {}
    for count in (1, 3, 2):
        inputs = make(count)
        refreshed = static.refresh(inputs)
        given, seen = flatten(inputs)[0], flatten(refreshed)[0]
        assert given.keys() == seen.keys()
        for name, tensor in seen.items():
            assert torch.equal(tensor, given[name]), f"{name} is not this step's"
            assert tensor.data_ptr() != given[name].data_ptr(), f"{name} is not the static buffer"
            assert addresses.setdefault(name, tensor.data_ptr()) == tensor.data_ptr(), f"{name} moved"
        assert flatten(refreshed)[1] == flatten(inputs)[1]
    assert static.num_bytes == sum(t.numel() * t.element_size() for t in flatten(make(1))[0].values())


@pytest.mark.parametrize(
    ("captured", "inputs"), [(captured_target, verify_inputs(2)), (captured_drafter, draft_inputs(2))]
)
def test_a_tensor_of_another_shape_or_type_is_an_error(captured: Any, inputs: PassInputs) -> None:
    for name, tensor in flatten(inputs)[0].items():
        for wrong in (tensor[:-1], torch.cat((tensor, tensor)), tensor.to(torch.int16)):
            static = captured()
            before = {key: value.clone() for key, value in static._buffers.items()}
            with pytest.raises(AssertionError, match=name):
                static.refresh(with_tensor(inputs, name, wrong))
            assert all(torch.equal(static._buffers[key], value) for key, value in before.items()), "half refreshed"


@pytest.mark.parametrize("name", ["metadata.max_query_len", "metadata.max_seq_len", "metadata.kv_block_size"])
def test_an_integer_that_differs_from_the_captured_one_is_an_error(name: str) -> None:
    with pytest.raises(AssertionError, match=rf"{name}=5 differs from the captured"):
        captured_target().refresh(with_tensor(verify_inputs(1), name, 5))


def test_missing_and_unexpected_tensors_are_errors() -> None:
    no_slots = with_tensor(verify_inputs(1), "metadata.slot_mapping_N", None)
    with pytest.raises(AssertionError, match=r"missing: \['metadata.slot_mapping_N'\]"):
        captured_target().refresh(no_slots)
    one_more = with_tensor(verify_inputs(1), "metadata.max_seq_len", torch.tensor(5))
    with pytest.raises(AssertionError, match=r"does not have: \['metadata.max_seq_len'\]"):
        captured_target().refresh(one_more)
    with pytest.raises(AssertionError, match="captured for TargetInputs, not DrafterInputs"):
        captured_target().refresh(draft_inputs(1))


def test_the_width_of_the_batch_is_the_captured_one() -> None:
    """A batch of another width has a key of its own; smuggled in under this one, it is refused."""
    narrow = PassWidths(draft=GAMMA - 1, verify=GAMMA)
    plan = plan_capture(PassKind.VERIFY, tier=TIER, widths=narrow, num_ranks=1)
    with pytest.raises(AssertionError, match="token_ids_N"):
        captured_target().refresh(builder().verify(plan, []).inputs)


def test_a_runner_captures_each_key_once_and_runs_on_its_buffers() -> None:
    runner = StaticRunner((TIER,))
    plan = find(decode_plan([2], tiers=(TIER,)), PassKind.DRAFT)
    key, inputs = GraphKey.of(plan, 0), draft_inputs(2)
    seen: list[Tensor] = []

    def forward(given: DrafterInputs) -> int:
        seen.append(given.anchor_ids_R)
        return int(given.anchor_ids_R.sum())

    runner.capture(key, draft_inputs(1), forward)
    assert runner.captured_keys == {key}
    assert runner.run(key, inputs, forward) == int(inputs.anchor_ids_R.sum()) > 0
    assert seen[0].data_ptr() == seen[1].data_ptr() != inputs.anchor_ids_R.data_ptr()
    with pytest.raises(AssertionError, match="captured already"):
        runner.capture(key, inputs, forward)
    with pytest.raises(AssertionError, match="is of no tier"):
        runner.capture(dataclasses.replace(key, requests=RequestCount(3)), inputs, forward)


# ----------------------------------------------------------------------------------------------------- reachable keys


def keys_of(tiers: Sequence[int], widths: PassWidths) -> set[GraphKey]:
    """What a start-up captures."""
    kinds = [PassKind.VERIFY, *([PassKind.DRAFT] if widths.draft else [])]
    return {
        GraphKey.of(plan_capture(kind, tier=tier, widths=widths, num_ranks=1), 0) for kind in kinds for tier in tiers
    }


@pytest.mark.parametrize("max_num_seqs", [1, 2, 8, 33, 64, 300])
@pytest.mark.parametrize("widths", [WIDTHS, PassWidths(draft=0, verify=1), PassWidths(draft=8, verify=8)])
def test_what_start_up_captures_is_exactly_what_steps_ask_for(max_num_seqs: int, widths: PassWidths) -> None:
    tiers = capture_sizes(max_num_seqs)
    reachable = reachable_keys(tiers=tiers, widths=widths, max_num_seqs=max_num_seqs, graph_capable=True)
    captured = keys_of(tiers, widths)
    prove_captured(reachable, captured=captured, eager=EAGER_WITH_TIERS)
    for key in captured:
        with pytest.raises(AssertionError, match="reachable but was not captured"):
            prove_captured(reachable, captured=captured - {key}, eager=EAGER_WITH_TIERS)
    one_more = dataclasses.replace(next(iter(captured)), tokens=PaddedTokenCount(9999))
    with pytest.raises(AssertionError, match="never reached"):
        prove_captured(reachable, captured=captured | {one_more}, eager=EAGER_WITH_TIERS)


def test_a_load_above_the_largest_tier_is_found_at_start_up() -> None:
    """Tiers that forget the maximum would run eagerly under the heaviest load, and on this rank alone."""
    tiers = capture_sizes(64)[:-1]
    reachable = reachable_keys(tiers=tiers, widths=WIDTHS, max_num_seqs=64, graph_capable=True)
    with pytest.raises(AssertionError, match="would run eagerly"):
        prove_captured(reachable, captured=keys_of(tiers, WIDTHS), eager=EAGER_WITH_TIERS)


def test_without_tiers_every_pass_is_declared_eager() -> None:
    reachable = reachable_keys(tiers=(), widths=WIDTHS, max_num_seqs=8, graph_capable=False)
    assert {key.kind for key in reachable} == set(PassKind)
    prove_captured(reachable, captured=frozenset(), eager=EAGER_WITHOUT_TIERS)
    with pytest.raises(AssertionError, match="would run eagerly"):
        prove_captured(reachable, captured=frozenset(), eager=EAGER_WITH_TIERS)
