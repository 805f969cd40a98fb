"""The target over a paged pool, in chunks and windows, gives what transformers gives for the whole sequence."""

from __future__ import annotations

import pytest
import torch
from tests.engine.zoo import Zoo, random_prompt
from tests.fixtures import TARGET_LAYER_IDS
from tests.reference_drafter import ReferenceTarget

from outrider.batch.step_plan import PassKind, PassWidths, RankRow, plan_step
from outrider.models.source import load_model
from outrider.runner.batch_builder import BatchBuilder, PrefillRow, VerifyRow
from outrider.runner.graph_runner import EagerRunner
from outrider.runner.kv_memory import allocate_kv, plan_kv_memory
from outrider.runner.model_runner import ModelRunner, TargetOutput

CPU = torch.device("cpu")


class OneRequest:
    """One request whose blocks lie scattered in the pool, moved on pass by pass."""

    def __init__(self, zoo: Zoo) -> None:
        loaded = load_model(str(zoo.path("rand")))
        layout = plan_kv_memory(
            budget_bytes=8 * 16, kv_block_size=16, target_bytes_per_token=1, drafter_bytes_per_token=0
        )
        self.runner = ModelRunner(
            target=loaded.model,
            kv_caches=allocate_kv(loaded.config, layout, dtype="float32", device=CPU),
            tap_layer_ids=TARGET_LAYER_IDS,
            graphs=EagerRunner(),
        )
        self.builder = BatchBuilder(rank=0, kv_block_size=16, max_model_len=48, mask_padded_tokens=False)
        self.block_ids = [5, 0, 7]

    def prefill(self, token_ids: list[int], *, start: int, samples: bool) -> TargetOutput:
        row = RankRow(
            prefill_requests=1,
            prefill_tokens=len(token_ids),
            prefill_logit_rows=int(samples),
            draft_requests=0,
            verify_requests=0,
            verify_tokens=0,
            graph_capable=1,
        )
        plan = plan_step([row], tiers=(), widths=PassWidths(draft=0, verify=8)).find(PassKind.PREFILL)
        assert plan is not None
        chunk = PrefillRow(token_ids=token_ids, start=start, block_ids=self.block_ids, samples=samples)
        return self.runner.run(self.builder.prefill(plan, [chunk]))

    def verify(self, token_ids: list[int], *, start: int) -> TargetOutput:
        row = RankRow(
            prefill_requests=0,
            prefill_tokens=0,
            prefill_logit_rows=0,
            draft_requests=0,
            verify_requests=1,
            verify_tokens=len(token_ids),
            graph_capable=1,
        )
        plan = plan_step([row], tiers=(), widths=PassWidths(draft=0, verify=8)).find(PassKind.VERIFY)
        assert plan is not None
        window = VerifyRow(token_ids=token_ids, start=start, block_ids=self.block_ids)
        return self.runner.run(self.builder.verify(plan, [window]))


@pytest.mark.parametrize("chunk", [7, 16, 30])
def test_chunks_and_windows_give_the_whole_sequences_logits_and_taps(chunk: int, zoo: Zoo) -> None:
    sequence = random_prompt(37)
    logits_TV, taps_TF = ReferenceTarget(zoo.path("rand")).run(sequence, TARGET_LAYER_IDS)
    request = OneRequest(zoo)
    prompt, taps = sequence[:30], []
    for start in range(0, 30, chunk):
        part = prompt[start : start + chunk]
        output = request.prefill(part, start=start, samples=start + chunk >= 30)
        assert output.positions_N.tolist() == list(range(start, start + len(part)))
        taps.append(output.taps_NF)
    torch.testing.assert_close(output.logits_KV, logits_TV[29:30], atol=1e-4, rtol=1e-4)
    assert output.logits_KV.dtype == torch.float32
    rejected = [(token_id + 1) % 61 for token_id in sequence[31:35]]
    request.verify([sequence[30], *rejected], start=30)  # what these drafts wrote is written over below
    output = request.verify(sequence[30:], start=30)
    taps.append(output.taps_NF)
    torch.testing.assert_close(output.logits_KV, logits_TV[30:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(taps), taps_TF, atol=1e-4, rtol=1e-4)
    assert output.slots_N.tolist() == [16 * request.block_ids[p // 16] + p % 16 for p in range(30, 37)]


def test_only_sampled_chunks_get_logits(zoo: Zoo) -> None:
    output = OneRequest(zoo).prefill(random_prompt(9), start=0, samples=False)
    assert output.logits_KV.shape == (0, 64)
    assert output.taps_NF.shape[0] == 9
