"""The DSpark proposer drafts what the dense reference drafts, for mixed requests and up to the context limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests import fixtures
from tests.engine.zoo import Zoo, random_prompt
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget
from torch import nn

from outrider.batch.step_plan import PassWidths, RankRow, StepPlan, plan_step
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.model_config import from_hf
from outrider.runner.batch_builder import BatchBuilder
from outrider.runner.graph_runner import EagerRunner
from outrider.runner.kv_memory import allocate_kv, plan_kv_memory
from outrider.sampling.backend import TorchSampling
from outrider.sampling.proposal import Proposal
from outrider.sampling.state import LogitRow, SequenceState
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.dspark_proposer import DSparkProposer
from outrider.spec_decode.proposer import DraftRequest

CPU = torch.device("cpu")
NUM_BLOCKS = 80  # of 16 slots


def make_proposer(path: Path, target: ReferenceTarget, gamma: int) -> DSparkProposer:
    drafter = load_drafter(
        path,
        target_config=from_hf(fixtures.target_config()),
        embed_weight=nn.Parameter(target.embedding_VD, requires_grad=False),
        lm_head_weight=nn.Parameter(target.head_VD, requires_grad=False),
    )
    layout = plan_kv_memory(
        budget_bytes=NUM_BLOCKS * 16, kv_block_size=16, target_bytes_per_token=1, drafter_bytes_per_token=0
    )
    return DSparkProposer(
        drafter=drafter.model,
        config=drafter.config,
        num_speculative_tokens=gamma,
        kv_caches=allocate_kv(drafter.config.decoder, layout, dtype="float32", device=CPU),
        builder=BatchBuilder(rank=0, kv_block_size=16, max_model_len=NUM_BLOCKS * 16, mask_padded_tokens=False),
        graphs=EagerRunner(),
        sampling=TorchSampling(),
    )


def decode_plan(proposer: DSparkProposer, requests: int) -> StepPlan:
    verify = 1 + proposer.num_speculative_tokens
    row = RankRow(
        prefill_requests=0,
        prefill_tokens=0,
        prefill_logit_rows=0,
        draft_requests=requests,
        verify_requests=requests,
        verify_tokens=requests * verify,
        graph_capable=1,
    )
    return plan_step([row], tiers=(), widths=PassWidths(draft=proposer.draft_width, verify=verify))


def add_request(
    proposer: DSparkProposer, target: ReferenceTarget, *, sequence: list[int], block_ids: list[int], num_drafts: int
) -> tuple[DraftRequest, torch.Tensor]:
    """The request whose anchor ends ``sequence``, its context written, and the features it was written from."""
    anchor_position = len(sequence) - 1
    _, taps_PF = target.run(sequence[:-1], proposer.tap_layer_ids)
    positions = torch.arange(anchor_position)
    slots = torch.tensor(block_ids)[positions // 16] * 16 + positions % 16
    proposer.write_context(taps_NF=taps_PF, positions_N=positions, slots_N=slots)
    state = SequenceState(
        params=SamplingParams(temperature=0.0, max_tokens=None), seed=0, prompt_token_ids=sequence, eos_token_ids=()
    )
    request = DraftRequest(
        row=LogitRow(state, (), anchor_position + 1, anchor_position),
        anchor_id=sequence[-1],
        block_ids=block_ids,
        num_drafts=num_drafts,
    )
    return request, taps_PF


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_a_mixed_batch_drafts_what_the_reference_drafts(gamma: int, zoo: Zoo) -> None:
    """Contexts of 1, 16, 17 and 300 positions; full depth, less, and none."""
    target = ReferenceTarget(zoo.path("rand"))
    reference = ReferenceDrafter.load(zoo.path("random"), target)
    proposer = make_proposer(zoo.path("random"), target, gamma)
    lengths, depths = (2, 17, 18, 301), (gamma, 0, min(2, gamma), gamma)
    free = list(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(4)).tolist())
    requests, expected = [], []
    for index, (length, depth) in enumerate(zip(lengths, depths, strict=True)):
        block_ids = [free.pop() for _ in range(-(-length // 16))]
        sequence = random_prompt(length, seed=index)
        request, taps = add_request(proposer, target, sequence=sequence, block_ids=block_ids, num_drafts=depth)
        requests.append(request)
        expected.append(tuple(reference.propose(taps, sequence[-1])[0][:depth]))
    proposal = proposer.propose(decode_plan(proposer, len(requests)), requests)
    assert proposal.draft_ids == tuple(expected)
    assert proposal.confidence_logits.shape == (4, gamma)


def test_drafting_at_the_context_limit(zoo: Zoo) -> None:
    """The anchor on the last position the model has: the block reaches beyond it, and what fits is drafted."""
    target = ReferenceTarget(zoo.path("rand"))
    reference = ReferenceDrafter.load(zoo.path("random"), target)
    proposer = make_proposer(zoo.path("random"), target, 7)
    sequence = random_prompt(fixtures.MAX_POSITIONS - 2)
    request, taps = add_request(proposer, target, sequence=sequence, block_ids=list(range(64)), num_drafts=2)
    proposal = proposer.propose(decode_plan(proposer, 1), [request])
    assert proposal.draft_ids == (tuple(reference.propose(taps, sequence[-1])[0][:2]),)


def test_no_draft_pass_in_the_plan_means_no_drafts(zoo: Zoo) -> None:
    proposer = make_proposer(zoo.path("random"), ReferenceTarget(zoo.path("rand")), 7)
    assert proposer.propose(decode_plan(proposer, 0), []).draft_ids == Proposal.one_hot([]).draft_ids
