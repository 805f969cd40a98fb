"""Batches built from plans: case S1 on every rank, padding to a tier, and no field that can be left out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from tests.engine.zoo import Zoo
from tests.fixtures import HIDDEN, TARGET_LAYER_IDS

from outrider.batch.forward_batch import DraftBatch, PassInputs, PrefillBatch, VerifyBatch
from outrider.batch.step_plan import (
    PaddingMode,
    PassKind,
    PassPlan,
    PassWidths,
    RankRow,
    StepPlan,
    plan_capture,
    plan_step,
)
from outrider.batch.tiers import capture_sizes
from outrider.layers.attention.interface import LayerKV
from outrider.models.decoder import Decoder
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.source import load_model
from outrider.runner.batch_builder import BatchBuilder, DraftRow, PrefillRow, VerifyRow
from outrider.runner.graph_runner import EagerRunner, GraphKey, StaticRunner
from outrider.runner.kv_memory import allocate_kv, plan_kv_memory
from outrider.runner.model_runner import ModelRunner

P = TypeVar("P", bound=PassInputs)
T = TypeVar("T")
GAMMA, SIZE, CPU = 6, 4, torch.device("cpu")
MAX_LEN = 27  # 7 blocks of 4, the last not to its end
REQUESTS = (1, 3, 0, 2)  # per rank, case S1
WIDTHS = PassWidths(draft=GAMMA, verify=GAMMA + 1)


class RecordingRunner(StaticRunner):
    """Remembers the keys it was asked for."""

    def __init__(self, tiers: tuple[int, ...]) -> None:
        super().__init__(tiers)
        self.keys: list[GraphKey] = []

    def run(self, key: GraphKey, inputs: P, forward: Callable[[P], T]) -> T:
        self.keys.append(key)
        return super().run(key, inputs, forward)


def decode_plan(requests: Sequence[int], *, tiers: Sequence[int]) -> StepPlan:
    rows = [
        RankRow(
            prefill_requests=0,
            prefill_tokens=0,
            prefill_logit_rows=0,
            draft_requests=n,
            verify_requests=n,
            verify_tokens=n * WIDTHS.verify,
            graph_capable=1,
        )
        for n in requests
    ]
    return plan_step(rows, tiers=tiers, widths=WIDTHS)


def prefill_plan(lengths: Sequence[int], num_sampled: int) -> PassPlan:
    row = RankRow(
        prefill_requests=len(lengths),
        prefill_tokens=sum(lengths),
        prefill_logit_rows=num_sampled,
        draft_requests=0,
        verify_requests=0,
        verify_tokens=0,
        graph_capable=1,
    )
    return find(plan_step([row], tiers=(), widths=WIDTHS), PassKind.PREFILL)


def find(plan: StepPlan, kind: PassKind) -> PassPlan:
    found = plan.find(kind)
    assert found is not None
    return found


def builder(rank: int = 0) -> BatchBuilder:
    return BatchBuilder(rank=rank, kv_block_size=SIZE, max_model_len=MAX_LEN, mask_padded_tokens=True)


def draft_rows(count: int) -> list[DraftRow]:
    return [
        DraftRow(anchor_id=10 + i, anchor_position=5 + i, block_ids=[4 * i + j for j in range(4)]) for i in range(count)
    ]


def verify_rows(count: int, *, width: int = GAMMA + 1) -> list[VerifyRow]:
    return [
        VerifyRow(token_ids=range(i, i + width), start=5 + i, block_ids=[4 * i + j for j in range(4)])
        for i in range(count)
    ]


# ------------------------------------------------------------------------------------------------------------- S1


@pytest.mark.parametrize("tiers", [(), (1, 2, 4, 8)], ids=["eager", "tiers"])
def test_s1_every_rank_builds_its_batches_from_the_one_plan(tiers: tuple[int, ...]) -> None:
    plan = decode_plan(REQUESTS, tiers=tiers)
    for rank, count in enumerate(REQUESTS):
        draft = builder(rank).draft(find(plan, PassKind.DRAFT), draft_rows(count))
        verify = builder(rank).verify(find(plan, PassKind.VERIFY), verify_rows(count))
        assert isinstance(draft, DraftBatch)
        assert isinstance(verify, VerifyBatch)
        for batch, width in ((draft, GAMMA), (verify, GAMMA + 1)):
            assert batch.requests.value == count
            assert batch.tokens.value == count * width
            assert batch.num_tokens_non_padded.dtype == torch.int32
            assert batch.num_tokens_non_padded.tolist() == [count * width]
        extent = 4 if tiers else count
        assert draft.anchor_ids_R.shape == draft.anchor_positions_R.shape == (extent,)
        assert draft.metadata.context_lens_R.shape == (extent,)
        assert draft.metadata.block_tables_RB.shape[0] == extent
        assert verify.token_ids_N.shape == verify.positions_N.shape == (extent * (GAMMA + 1),)
        assert verify.metadata.query_start_loc_R1.shape == (extent + 1,)
        assert verify.metadata.seq_lens_R.shape == (extent,)
    assert builder(0).draft(find(plan, PassKind.DRAFT), draft_rows(1)).num_tokens_non_padded.tolist() == [6]


@pytest.mark.parametrize("tiers", [(), (1, 2, 4, 8)], ids=["eager", "tiers"])
def test_s1_the_idle_rank_runs_the_same_passes(
    tiers: tuple[int, ...], zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero real rows through a target that crosses ranks, and through the drafter; nothing is written to the pool."""
    monkeypatch.setattr(Decoder, "crosses_dp_ranks", True)  # as one with experts does
    plan, graphs = decode_plan(REQUESTS, tiers=tiers), RecordingRunner(tiers)
    target, pool = target_runner(zoo, graphs, rank=2, num_ranks=len(REQUESTS))
    draft = builder(2).draft(find(plan, PassKind.DRAFT), [])
    output = target.run(builder(2).verify(find(plan, PassKind.VERIFY), []))
    assert output.logits_KV.shape == (0, 64)
    assert output.taps_NF.shape == (0, len(TARGET_LAYER_IDS) * HIDDEN)
    assert output.slots_N.shape == output.positions_N.shape == (0,)
    assert all(bool(kv.key_SHD.isnan().all()) for kv in pool)
    assert [key.requests.value for key in graphs.keys] == [4 if tiers else 0]
    drafter, draft_pool = load_small_drafter(zoo)
    with torch.inference_mode():
        hidden = drafter.model(draft.anchor_ids_R, draft.anchor_positions_R, draft_pool, draft.metadata, draft.experts)
    assert hidden.shape == (4 if tiers else 0, GAMMA, HIDDEN)
    assert not hidden.isnan().any()


def test_a_dense_target_is_left_out_where_a_rank_has_no_rows(zoo: Zoo) -> None:
    """Nothing waits for this rank; what it gets has the shapes of a forward's."""
    plan, graphs = decode_plan(REQUESTS, tiers=()), RecordingRunner(())
    target, _ = target_runner(zoo, graphs)
    output = target.run(builder(2).verify(find(plan, PassKind.VERIFY), []))
    assert graphs.keys == []
    assert output.logits_KV.shape == (0, 64)
    assert output.logits_KV.dtype == torch.float32
    assert output.finite_K == ()
    assert output.taps_NF.shape == (0, len(TARGET_LAYER_IDS) * HIDDEN)


def target_runner(
    zoo: Zoo, graphs: StaticRunner, *, rank: int = 0, num_ranks: int = 1
) -> tuple[ModelRunner, list[LayerKV]]:
    """The RAND target over a pool of NaN, its tiers captured: whoever reads a slot that was not written shows it."""
    loaded = load_model(str(zoo.path("rand")))
    layout = plan_kv_memory(
        budget_bytes=16 * SIZE, kv_block_size=SIZE, target_bytes_per_token=1, drafter_bytes_per_token=0
    )
    pool = allocate_kv(loaded.config, layout, dtype="float32", device=CPU)
    for kv in pool:
        kv.key_SHD.fill_(torch.nan)
        kv.value_SHD.fill_(torch.nan)
    runner = ModelRunner(target=loaded.model, kv_caches=pool, tap_layer_ids=TARGET_LAYER_IDS, graphs=graphs)
    for tier in graphs.tiers:
        runner.capture(plan_capture(PassKind.VERIFY, tier=tier, widths=WIDTHS, num_ranks=num_ranks), builder(rank))
    return runner, pool


def load_small_drafter(zoo: Zoo) -> tuple[Any, list[LayerKV]]:
    """RANDOM with a block of GAMMA, over a pool of NaN."""
    loaded = load_model(str(zoo.path("rand")))
    drafter = load_drafter(
        zoo.edited("random", block_size=GAMMA),
        target_config=loaded.config,
        embed_weight=loaded.model.embed_tokens.weight,
        lm_head_weight=loaded.model.lm_head.weight,
    )
    layout = plan_kv_memory(
        budget_bytes=16 * SIZE, kv_block_size=SIZE, target_bytes_per_token=1, drafter_bytes_per_token=0
    )
    pool = allocate_kv(drafter.config.decoder, layout, dtype="float32", device=CPU)
    for kv in pool:
        kv.key_SHD.fill_(torch.nan)
        kv.value_SHD.fill_(torch.nan)
    return drafter, pool


@pytest.mark.parametrize("max_num_seqs", [8, 64])
@pytest.mark.parametrize("kept", [1, 4, GAMMA + 1])
def test_non_padded_counts_of_all_count_vectors(kept: int, max_num_seqs: int) -> None:
    """Whatever the tier and however far the drafts are cut: int32, and exactly the real rows of each rank."""
    tiers = capture_sizes(max_num_seqs)
    for counts in itertools.combinations_with_replacement((1, 2, 3, 7, 8, 9, 0), 4):
        plan = decode_plan(counts, tiers=tiers)
        for pass_plan in plan.passes:
            for rank in {counts.index(count) for count in counts}:  # ranks of one load build alike
                count = counts[rank]
                if pass_plan.kind is PassKind.DRAFT:
                    batch: DraftBatch | VerifyBatch = builder(rank).draft(pass_plan, draft_rows(1) * count)
                    real, padded = count * GAMMA, batch.inputs.metadata.block_tables_RB.shape[0] * GAMMA
                else:
                    verify = builder(rank).verify(pass_plan, verify_rows(1, width=kept) * count)
                    batch, real, padded = verify, count * kept, verify.token_ids_N.shape[0]
                assert batch.tokens.value == real
                for tensor in (batch.num_tokens_non_padded, batch.experts.num_tokens_non_padded):
                    assert tensor.dtype == torch.int32
                    assert tensor.tolist() == [real]
                assert batch.experts.padded_tokens == tuple(c.value for c in pass_plan.padded_tokens)
                assert padded == (pass_plan.tier * pass_plan.width if pass_plan.tier else real)
                assert batch.experts.captured == bool(pass_plan.tier)


# -------------------------------------------------------------------------------------------------------- padding


def test_padding_rows_own_nothing() -> None:
    plan = decode_plan([2], tiers=(4,))
    verify = builder().verify(find(plan, PassKind.VERIFY), verify_rows(2))
    real, padded = 14, 28
    metadata = verify.metadata
    assert verify.plan.padding_mode is PaddingMode.TIER
    assert verify.token_ids_N.shape == (padded,)
    assert metadata.slot_mapping_N[real:].tolist() == [-1] * (padded - real)
    assert metadata.query_start_loc_R1.tolist() == [0, 7, 14, 14, 14]
    assert metadata.seq_lens_R.tolist() == [12, 13, 0, 0]
    assert metadata.block_tables_RB[2:].count_nonzero() == 0
    draft = builder().draft(find(plan, PassKind.DRAFT), draft_rows(2))
    assert draft.metadata.context_lens_R.tolist() == [5, 6, 0, 0]


def test_slots_and_positions_follow_the_block_table() -> None:
    plan = find(decode_plan([1], tiers=()), PassKind.VERIFY)
    row = VerifyRow(token_ids=[7, 8, 9], start=6, block_ids=[9, 2, 5])  # position 6 is offset 2 of block 2
    batch = builder().verify(plan, [row])
    assert batch.positions_N.tolist() == [6, 7, 8]
    assert batch.metadata.slot_mapping_N.tolist() == [2 * SIZE + 2, 2 * SIZE + 3, 5 * SIZE]
    assert batch.metadata.max_query_len == 3
    assert batch.metadata.max_seq_len == 9


def test_a_row_behind_its_blocks_is_an_error() -> None:
    plan = find(decode_plan([1], tiers=()), PassKind.VERIFY)
    with pytest.raises(AssertionError, match="rows up to 9 exceed 2 blocks of 4"):
        builder().verify(plan, [VerifyRow(token_ids=[7, 8, 9], start=6, block_ids=[9, 2])])


def test_a_padded_pass_gives_what_the_unpadded_one_gives(zoo: Zoo) -> None:
    """Two requests with their contexts, verified eagerly and in tiers of 2 and 4; then drafted for alike."""
    eager = run_decode(zoo, tiers=())
    for tier in (2, 4):
        padded = run_decode(zoo, tiers=(tier,))
        for name, expected in eager.items():
            torch.testing.assert_close(padded[name], expected, atol=1e-5, rtol=1e-5, equal_nan=True, msg=name)


def run_decode(zoo: Zoo, *, tiers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    graphs = RecordingRunner(tiers)
    target, pool = target_runner(zoo, graphs)
    drafter, draft_pool = load_small_drafter(zoo)
    contexts = [range(20, 25), range(40, 46)]  # of the rows below: lengths 5 and 6
    prefill = builder().prefill(
        prefill_plan([5, 6], 0),
        [
            PrefillRow(token_ids=context, start=0, block_ids=row.block_ids, samples=False)
            for context, row in zip(contexts, draft_rows(2), strict=True)
        ],
    )
    plan = decode_plan([2], tiers=tiers)
    draft = builder().draft(find(plan, PassKind.DRAFT), draft_rows(2))
    with torch.inference_mode():
        output = target.run(prefill)
        drafter.model.write_context(output.taps_NF, output.positions_N, draft_pool, output.slots_N)
        hidden = drafter.model(draft.anchor_ids_R, draft.anchor_positions_R, draft_pool, draft.metadata, draft.experts)[
            :2
        ]
    verified = target.run(builder().verify(find(plan, PassKind.VERIFY), verify_rows(2)))
    assert graphs.keys[-1].requests.value == (tiers[0] if tiers else 0)
    assert graphs.keys[-1].tokens.value == (tiers[0] if tiers else 2) * (GAMMA + 1)
    assert verified.logits_KV.shape == (14, 64), "the extent of what is handed back is the real rows'"
    assert not verified.logits_KV.isnan().any()
    return {
        "hidden": hidden,
        "logits": verified.logits_KV,
        "taps": verified.taps_NF,
        "slots": verified.slots_N,
        "keys": torch.stack([kv.key_SHD for kv in pool]),
        "values": torch.stack([kv.value_SHD for kv in pool]),
    }


# ----------------------------------------------------------------------------------- what cannot be left out or wrong


def batches() -> list[PrefillBatch | DraftBatch | VerifyBatch]:
    plan = decode_plan([1], tiers=())
    row = PrefillRow(token_ids=[1, 2], start=0, block_ids=[0], samples=True)
    return [
        builder().prefill(prefill_plan([2], 1), [row]),
        builder().draft(find(plan, PassKind.DRAFT), draft_rows(1)),
        builder().verify(find(plan, PassKind.VERIFY), verify_rows(1)),
    ]


def fields_of(batch: PrefillBatch | DraftBatch | VerifyBatch) -> dict[str, Any]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)
def test_every_field_is_required_and_nothing_is_assigned_later(
    batch: PrefillBatch | DraftBatch | VerifyBatch,
) -> None:
    fields = fields_of(batch)
    assert {"plan", "rank", "requests", "tokens", "num_tokens_non_padded", "metadata"} <= set(fields)
    for name in fields:
        rest = {other: value for other, value in fields.items() if other != name}
        with pytest.raises(TypeError, match=name):
            type(batch)(**rest)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)
def test_counts_that_contradict_the_plan_are_errors(batch: PrefillBatch | DraftBatch | VerifyBatch) -> None:
    fields = fields_of(batch)
    wrong: list[dict[str, Any]] = [
        {"requests": type(batch.requests)(batch.requests.value + 1)},
        {"num_tokens_non_padded": batch.num_tokens_non_padded.long()},
        {"num_tokens_non_padded": batch.num_tokens_non_padded + 1},
        {"tokens": type(batch.tokens)(1000)},
    ]
    for change in wrong:
        with pytest.raises(AssertionError):
            type(batch)(**{**fields, **change})


def test_a_batch_of_another_pass_is_an_error() -> None:
    plan = decode_plan([1], tiers=())
    with pytest.raises(AssertionError, match="needs the plan of a verify pass"):
        builder().verify(find(plan, PassKind.DRAFT), verify_rows(1))
    with pytest.raises(AssertionError, match="wider than the pass"):
        builder().verify(
            find(decode_plan([2], tiers=()), PassKind.VERIFY), [*verify_rows(1, width=8), *verify_rows(1, width=1)]
        )


def test_an_uncaptured_tier_is_refused_rather_than_run_eagerly() -> None:
    plan = find(decode_plan([3], tiers=(4,)), PassKind.DRAFT)
    key = GraphKey.of(plan, 0)
    assert (key.model, key.kind, key.requests.value, key.tokens.value) == ("drafter", PassKind.DRAFT, 4, 24)
    inputs = builder().draft(plan, draft_rows(3)).inputs
    with pytest.raises(AssertionError, match="captured graph"):
        EagerRunner().run(key, inputs, lambda _: None)
    with pytest.raises(AssertionError, match="was not captured"):
        StaticRunner((4,)).run(key, inputs, lambda _: None)
    eager = GraphKey.of(find(decode_plan([3], tiers=()), PassKind.VERIFY), 0)
    assert (eager.model, eager.requests.value, eager.tokens.value) == ("target", 0, 21)
    assert EagerRunner().run(eager, inputs, lambda given: given is inputs)
    assert StaticRunner((4,)).run(eager, inputs, lambda given: given is inputs)
