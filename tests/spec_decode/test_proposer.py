"""The proposers without a model: none, and prompt lookup over prompt and output."""

from __future__ import annotations

import torch

from outrider.batch.step_plan import IDLE_ROW, PassWidths, StepPlan, plan_step
from outrider.sampling.state import LogitRow, SequenceState
from outrider.sampling_params import SamplingParams
from outrider.spec_decode.proposer import DraftRequest, NoProposer, PromptLookupProposer, Proposer


def request(prompt: list[int], output: list[int], *, num_drafts: int) -> DraftRequest:
    state = SequenceState(params=SamplingParams(), seed=0, prompt_token_ids=prompt, eos_token_ids=())
    state.append(output)
    position = len(prompt) + len(output)
    row = LogitRow(state, (), position, position - 1)
    return DraftRequest(row=row, anchor_id=output[-1], block_ids=[], num_drafts=num_drafts)


def plan() -> StepPlan:
    return plan_step([IDLE_ROW], tiers=(), widths=PassWidths(draft=0, verify=1))


def test_lookup_drafts_from_prompt_and_output_within_each_requests_room() -> None:
    proposer: Proposer = PromptLookupProposer(num_speculative_tokens=4, max_ngram=2, min_ngram=1)
    requests = [
        request([1, 2, 3, 4, 5, 9, 1], [2], num_drafts=4),  # 1 2 again, begun in the prompt and ended in the output
        request([1, 2, 3, 4, 5, 9, 1], [2], num_drafts=2),
        request([7], [8], num_drafts=4),
        request([7, 7, 7], [7], num_drafts=0),
    ]
    proposal = proposer.propose(plan(), requests)
    assert proposal.draft_ids == ((3, 4, 5, 9), (3, 4), (), ())
    assert proposal.q_steps == ()
    assert proposal.confidence_logits.shape == (4, 0)


def test_none_drafts_nothing_and_needs_nothing() -> None:
    proposer: Proposer = NoProposer()
    assert proposer.propose(plan(), [request([1], [2], num_drafts=0)]).draft_ids == ((),)
    assert (proposer.num_speculative_tokens, proposer.draft_width, proposer.tap_layer_ids) == (0, 0, ())
    nothing = torch.empty(0)
    proposer.write_context(taps_NF=nothing, positions_N=nothing, slots_N=nothing)
