"""The step loop. ``EngineCore.step`` reads as a sentence: schedule, agree, prefill, draft, choose verify lengths,
verify, accept, commit.

Invariants at the start of a step, for every decoding sequence with its anchor at position p: target KV and draft
context cover exactly the positions below p. A step writes state for committed positions only: draft context of kept
rows, tokens up to the first stop event; a rejected draft leaves nothing but slots that are written again.

Nothing here knows which model family, proposer or device runs. With data-parallel ranks every rank runs this loop and
``agree`` is where they meet: one all-gather a step, after which nothing rank-local decides which passes run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.batch.step_plan import PassKind, PassWidths, RankRow, StepPlan, plan_step
from outrider.config import EngineConfig
from outrider.engine.request_group import RequestGroup
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidRequestError
from outrider.logger import get_logger
from outrider.models.tokenizer import Tokenizer
from outrider.outputs import EngineStats, RequestOutput
from outrider.parallel.communicator import Communicator
from outrider.runner.batch_builder import BatchBuilder, PrefillRow, VerifyRow
from outrider.runner.graph_runner import GraphRunner
from outrider.runner.model_runner import ModelRunner, TargetOutput
from outrider.sampling.processors import process
from outrider.sampling.proposal import Proposal
from outrider.sampling.rejection import accept
from outrider.sampling.sampler import RawLogprobs, compute_logprobs, sample
from outrider.sampling.state import LogitRow
from outrider.sampling_params import SamplingParams
from outrider.scheduler.output import DecodeRow, PrefillChunk, SchedulerOutput
from outrider.scheduler.request import Request
from outrider.scheduler.scheduler import Scheduler
from outrider.spec_decode.counters import SpecAccumulator
from outrider.spec_decode.proposer import DraftRequest, Proposer
from outrider.spec_decode.verify_length import choose_verify_lengths

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one sequence verifies in this step: its anchor and the drafts kept."""

    sequence: Sequence
    row: DecodeRow
    drafts: tuple[int, ...]
    num_offered: int

    @property
    def rows(self) -> list[LogitRow]:
        """One row of logits for each position that may be emitted."""
        p = self.row.request.num_computed_tokens
        return [LogitRow(self.sequence.state, self.drafts[:j], p + 1 + j, p) for j in range(1 + len(self.drafts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Tokens a request may emit, before stop events are looked for, with their logprobs where asked for."""

    sequence: Sequence
    num_computed: int  # positions whose state is final if all tokens are kept
    token_ids: tuple[int, ...]
    logprobs: Seq[RawLogprobs]
    first_row: int  # of its rows in the verify pass
    num_offered: int  # drafts verified; -1: the token comes from prefill and belongs to no round


class EngineCore:
    def __init__(
        self,
        *,
        config: EngineConfig,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        proposer: Proposer,
        graphs: GraphRunner,
        communicator: Communicator,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._proposer = proposer
        self._graphs = graphs
        self._communicator = communicator
        self._widths = PassWidths(draft=proposer.draft_width, verify=1 + proposer.num_speculative_tokens)
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[str, Sequence] = {}
        self._seeds = random.Random(config.seed)
        self._spec = SpecAccumulator()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    # ---- requests

    @property
    def has_unfinished(self) -> bool:
        return self._scheduler.has_unfinished

    def add_request(
        self, *, request_id: str, prompt: str | None, prompt_token_ids: Seq[int], params: SamplingParams
    ) -> None:
        """Queue a request: n sequences of one prompt, all of them or none."""
        if request_id in self._groups:
            raise InvalidRequestError(f"request_id={request_id!r} is in use already", param="request_id")
        params.validate_for(self.vocab_size)
        wrong = next((i for i in prompt_token_ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"prompt: token id {wrong} must lie in 0..{self.vocab_size - 1} (vocab_size)", param="prompt"
            )
        group = RequestGroup(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            arrival_time=time.perf_counter(),
        )
        base_seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        try:
            for index in range(params.n):
                sequence = self._new_sequence(group, index, seed=base_seed + index)
                self._scheduler.add(sequence.request)
                group.sequences.append(sequence)
        except Exception:
            for sequence in group.sequences:
                self._scheduler.abort(sequence.request.request_id)
            raise
        self._groups[request_id] = group
        self._sequences.update((s.request.request_id, s) for s in group.sequences)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands, between steps; its last snapshot, or None if there is none of this id."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for sequence in group.sequences:
            if sequence.finish_reason is None:
                self._scheduler.abort(sequence.request.request_id)
                self._end(sequence, "abort")
        return self._snapshot(group)

    # ---- the step

    def step(self) -> list[RequestOutput]:
        """Run one step; snapshots of the requests that got tokens or ended."""
        schedule = self._scheduler.schedule()
        plan = self._agree(schedule)
        emissions = self._prefill(plan, schedule.prefills)
        proposal = self._draft(plan, schedule.decodes)
        windows = self._choose_verify_lengths(schedule.decodes, proposal)
        verified = self._verify(plan, windows)
        emissions += self._accept(windows, proposal, verified)
        return self._commit(schedule, emissions, verified)

    def _agree(self, schedule: SchedulerOutput) -> StepPlan:
        """One row of integers from every rank, one plan for all of them."""
        num_decodes = len(schedule.decodes)
        row = RankRow(
            prefill_requests=len(schedule.prefills),
            prefill_tokens=sum(chunk.length for chunk in schedule.prefills),
            prefill_logit_rows=sum(chunk.samples for chunk in schedule.prefills),
            draft_requests=num_decodes if self._proposer.draft_width else 0,
            verify_requests=num_decodes,
            verify_tokens=sum(decode.verify_width for decode in schedule.decodes),
            graph_capable=1,
        )
        rows = [RankRow.decode(values) for values in self._communicator.all_gather_row(row.encode())]
        return plan_step(rows, tiers=self._graphs.tiers, widths=self._widths)

    def _prefill(self, plan: StepPlan, chunks: Seq[PrefillChunk]) -> list[Emission]:
        """Prompt chunks through the target; their positions are final, so their draft context is written at once."""
        pass_plan = plan.find(PassKind.PREFILL)
        if pass_plan is None:
            return []
        rows = [
            PrefillRow(
                token_ids=chunk.request.tokens_between(chunk.start, chunk.start + chunk.length),
                start=chunk.start,
                block_ids=chunk.request.block_ids,
                samples=chunk.samples,
            )
            for chunk in chunks
        ]
        output = self._runner.run(self._builder.prefill(pass_plan, rows))
        self._proposer.write_context(
            taps_NF=output.taps_NF, positions_N=output.positions_N, slots_N=output.slots_N
        )
        sampling = [self._sequences[chunk.request.request_id] for chunk in chunks if chunk.samples]
        logit_rows = [
            LogitRow(s.state, (), s.request.num_prompt_tokens, s.request.num_prompt_tokens - 1) for s in sampling
        ]
        tokens = sample(process(output.logits_KV, logit_rows), logit_rows).tolist() if sampling else []
        logprobs = self._logprobs(output, [(s, row, (token,)) for row, (s, token) in enumerate(zip(sampling, tokens))])
        first = {
            s.request.request_id: ((token,), found)
            for s, token, found in zip(sampling, tokens, logprobs, strict=True)
        }
        nothing: tuple[tuple[int, ...], Seq[RawLogprobs]] = ((), ())
        emissions = []
        for chunk in chunks:
            token_ids, found = first.get(chunk.request.request_id, nothing)
            emissions.append(
                Emission(
                    sequence=self._sequences[chunk.request.request_id],
                    num_computed=chunk.length,
                    token_ids=token_ids,
                    logprobs=found,
                    first_row=-1,
                    num_offered=-1,
                )
            )
        return emissions

    def _draft(self, plan: StepPlan, decodes: Seq[DecodeRow]) -> Proposal:
        requests = []
        for decode in decodes:
            request, state = decode.request, self._sequences[decode.request.request_id].state
            p = request.num_computed_tokens
            requests.append(
                DraftRequest(
                    row=LogitRow(state, (), p + 1, p),
                    anchor_id=request.anchor,
                    block_ids=request.block_ids,
                    num_drafts=decode.verify_width - 1,
                )
            )
        return self._proposer.propose(plan, requests)

    def _choose_verify_lengths(self, decodes: Seq[DecodeRow], proposal: Proposal) -> list[Window]:
        lengths = choose_verify_lengths(proposal, threshold=self.config.draft_confidence_threshold)
        return [
            Window(
                sequence=self._sequences[decode.request.request_id],
                row=decode,
                drafts=tuple(drafts[:length]),
                num_offered=length,
            )
            for decode, drafts, length in zip(decodes, proposal.draft_ids, lengths, strict=True)
        ]

    def _verify(self, plan: StepPlan, windows: Seq[Window]) -> TargetOutput | None:
        """Anchors and kept drafts through the target; None when no rank decodes."""
        pass_plan = plan.find(PassKind.VERIFY)
        if pass_plan is None:
            return None
        rows = [
            VerifyRow(
                token_ids=(window.row.request.anchor, *window.drafts),
                start=window.row.request.num_computed_tokens,
                block_ids=window.row.request.block_ids,
            )
            for window in windows
        ]
        return self._runner.run(self._builder.verify(pass_plan, rows))

    def _accept(self, windows: Seq[Window], proposal: Proposal, verified: TargetOutput | None) -> list[Emission]:
        if verified is None or not windows:
            return []
        logit_rows = [row for window in windows for row in window.rows]
        widths = [1 + len(window.drafts) for window in windows]
        accepted = accept(
            dist=process(verified.logits_KV, logit_rows), rows=logit_rows, proposal=proposal, widths=widths
        )
        starts = [sum(widths[:i]) for i in range(len(widths))] if len(widths) < 2 else _starts(widths)
        logprobs = self._logprobs(
            verified, [(w.sequence, start, a.token_ids) for w, start, a in zip(windows, starts, accepted, strict=True)]
        )
        return [
            Emission(
                sequence=window.sequence,
                num_computed=len(result.token_ids),
                token_ids=tuple(result.token_ids),
                logprobs=found,
                first_row=start,
                num_offered=window.num_offered,
            )
            for window, result, found, start in zip(windows, accepted, logprobs, starts, strict=True)
        ]
