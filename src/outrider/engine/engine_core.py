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
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch

from outrider.batch.step_plan import PassKind, PassWidths, RankRow, StepPlan, plan_step
from outrider.config import EngineConfig
from outrider.engine.agreement import StepAgreement
from outrider.engine.request_group import RequestGroup
from outrider.engine.request_rules import RequestRules
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidRequestError
from outrider.layers.moe import ExpertLoad
from outrider.logger import get_logger
from outrider.models.tokenizer import Tokenizer
from outrider.outputs import EngineStats, RequestOutput
from outrider.runner.batch_builder import BatchBuilder, PrefillRow, VerifyRow
from outrider.runner.graph_runner import GraphRunner
from outrider.runner.model_runner import ModelRunner, TargetOutput
from outrider.sampling.backend import SamplingBackend
from outrider.sampling.proposal import Proposal
from outrider.sampling.random import derive_seed
from outrider.sampling.sampler import RawLogprobs, compute_logprobs
from outrider.sampling.state import LogitRow
from outrider.sampling_params import SamplingParams
from outrider.scheduler.output import DecodeRow, PrefillChunk, SchedulerOutput
from outrider.scheduler.request import Request
from outrider.scheduler.scheduler import Scheduler
from outrider.spec_decode.counters import SpecAccumulator
from outrider.spec_decode.proposer import DraftRequest, Proposer
from outrider.spec_decode.verify_length import choose_verify_lengths

logger = get_logger(__name__)

NOT_FINITE = "the model's logits are not finite (NaN or infinity) at this request's position"


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
    num_offered: int  # drafts verified; -1: the token comes from prefill
    is_round: bool  # False: of prefill, or decoded without drafting because of the load
    error: str  # why the request cannot go on; "" if it can


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
        sampling: SamplingBackend,
        agreement: StepAgreement,
        expert_load: ExpertLoad,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rules = RequestRules.of(config, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._proposer = proposer
        self._graphs = graphs
        self._sampling = sampling
        self.agreement = agreement
        self.plan: StepPlan | None = None  # of the latest step, for who compares ranks; None before the first
        self._expert_load = expert_load
        self._widths = PassWidths(draft=proposer.draft_width, verify=1 + proposer.num_speculative_tokens)
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[str, Sequence] = {}  # unfinished ones, by the scheduler's request id
        self._group_of: dict[str, RequestGroup] = {}  # of the same ids
        self._seeds = random.Random(config.seed)
        self._interrupted = threading.Event()
        self._spec = SpecAccumulator()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._num_undrafted_tokens = 0

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
        self._rules.check(prompt_token_ids, params)
        self._scheduler.require_room(params.n)  # before n sequences are made
        group = RequestGroup(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(prompt_token_ids),
            params=params,
            arrival_time=time.perf_counter(),
        )
        base_seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        group.sequences = [
            self._new_sequence(group, index, seed=derive_seed(base_seed, index)) for index in range(params.n)
        ]
        self._scheduler.add(*(sequence.request for sequence in group.sequences))
        self._groups[request_id] = group
        for sequence in group.sequences:
            self._sequences[sequence.request.request_id] = sequence
            self._group_of[sequence.request.request_id] = group

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands, between steps; its last snapshot, or None if there is none of this id."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for sequence in group.sequences:
            if sequence.finish_reason is None:
                self._scheduler.abort(sequence.request.request_id)
                sequence.end("abort")
                self._forget(sequence)
        return group.output()

    # ---- the step

    def step(self) -> list[RequestOutput]:
        """Run one step; snapshots of the requests that got tokens or ended."""
        schedule = self._scheduler.schedule()
        plan = self._agree(schedule)
        emissions = self._prefill(plan, schedule.prefills)
        proposal = self._draft(plan, schedule)
        windows = self._choose_verify_lengths(schedule.decodes, proposal)
        verified = self._verify(plan, windows)
        emissions += self._accept(windows, proposal, verified)
        return self._commit(emissions, verified)

    def _agree(self, schedule: SchedulerOutput) -> StepPlan:
        """One row of integers from every rank, one plan for all of them."""
        num_decodes = len(schedule.decodes)
        row = RankRow(
            prefill_requests=len(schedule.prefills),
            prefill_tokens=sum(chunk.length for chunk in schedule.prefills),
            prefill_logit_rows=sum(chunk.samples for chunk in schedule.prefills),
            draft_requests=num_decodes if self._proposer.draft_width and schedule.drafting else 0,
            verify_requests=num_decodes,
            verify_tokens=sum(decode.verify_width for decode in schedule.decodes),
            graph_capable=int(self._graphs.capable),
        )
        rows = self.agreement.gather(row, num_unfinished=self._scheduler.num_unfinished)
        self.plan = plan_step(rows, tiers=self._graphs.tiers, widths=self._widths)
        return self.plan

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
        for chunk in chunks:
            self._group_of[chunk.request.request_id].note_scheduled()
        output = self._runner.run(self._builder.prefill(pass_plan, rows))
        self._write_context(output, slice(None))
        sampling = [self._sequences[chunk.request.request_id] for chunk in chunks if chunk.samples]
        logit_rows = [
            LogitRow(s.state, (), s.request.num_prompt_tokens, s.request.num_prompt_tokens - 1) for s in sampling
        ]
        tokens = self._sample(output, logit_rows)
        logprobs = self._logprobs(
            output, [(s, row, (token,)) for row, (s, token) in enumerate(zip(sampling, tokens, strict=True))]
        )
        sampled = iter(zip(tokens, logprobs, output.finite_K, strict=True))
        emissions = []
        for chunk in chunks:
            token, found, finite = next(sampled) if chunk.samples else (-1, (), True)
            emissions.append(
                Emission(
                    sequence=self._sequences[chunk.request.request_id],
                    num_computed=chunk.length,
                    token_ids=(token,) if chunk.samples else (),
                    logprobs=found,
                    first_row=-1,
                    num_offered=-1,
                    is_round=False,
                    error="" if finite else NOT_FINITE,
                )
            )
        return emissions

    def _sample(self, output: TargetOutput, rows: Seq[LogitRow]) -> list[int]:
        """One token per row, without drafts: windows of one row."""
        if not rows:
            return []
        accepted = self._sampling.accept(
            logits_NV=output.logits_KV,
            rows=rows,
            proposal=Proposal.one_hot([()] * len(rows)),
            widths=[1] * len(rows),
        )
        return [token_id for result in accepted for token_id in result.token_ids]

    def _draft(self, plan: StepPlan, schedule: SchedulerOutput) -> Proposal:
        """Drafts of all or, where none of them drafts, of none; other ranks may need this one in their pass."""
        if not schedule.drafting:
            self._proposer.propose(plan, [])
            return Proposal.one_hot([()] * len(schedule.decodes))
        requests = []
        for decode in schedule.decodes:
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
        accepted = self._sampling.accept(
            logits_NV=verified.logits_KV, rows=logit_rows, proposal=proposal, widths=widths
        )
        starts = [0, *accumulate(widths)][:-1]
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
                is_round=window.row.drafting,
                # Rows behind the emitted tokens belong to rejected drafts, which the target alone would never have run.
                error="" if all(verified.finite_K[start : start + len(result.token_ids)]) else NOT_FINITE,
            )
            for window, result, found, start in zip(windows, accepted, logprobs, starts, strict=True)
        ]

    def _logprobs(self, output: TargetOutput, spans: Seq[tuple[Sequence, int, Seq[int]]]) -> list[Seq[RawLogprobs]]:
        """Of each span (sequence, first logit row, its tokens) one entry a token, where the sequence asks for them."""
        rows: list[int] = []
        tokens: list[int] = []
        num_top: list[int] = []
        for sequence, start, token_ids in spans:
            if sequence.params.logprobs is not None:
                rows += range(start, start + len(token_ids))
                tokens += token_ids
                num_top += [sequence.params.logprobs] * len(token_ids)
        if not rows:
            return [()] * len(spans)
        found = iter(compute_logprobs(output.logits_KV[rows], torch.tensor(tokens), num_top))
        return [
            [next(found) for _ in token_ids] if sequence.params.logprobs is not None else ()
            for sequence, _, token_ids in spans
        ]

    def _commit(self, emissions: Seq[Emission], verified: TargetOutput | None) -> list[RequestOutput]:
        """Make output what comes before each first stop event, and write state for those positions only."""
        changed: dict[str, RequestGroup] = {}
        kept_rows: list[int] = []
        commits: list[tuple[Emission, int]] = []
        for emission in emissions:
            num_kept = self._take(emission)
            commits.append((emission, num_kept))
            if emission.num_offered >= 0:
                kept_rows += range(emission.first_row, emission.first_row + num_kept)
        if verified is not None:
            self._write_context(verified, _index(kept_rows))
        for emission, num_kept in commits:
            self._commit_one(emission, num_kept, changed)
        self._num_steps += 1
        return [group.output() for group in changed.values()]

    def _write_context(self, output: TargetOutput, rows: slice | torch.Tensor) -> None:
        """Draft context of rows whose positions are final. Slices take time, and not every proposer has a context."""
        if self._proposer.tap_layer_ids:
            self._proposer.write_context(
                taps_NF=output.taps_NF[rows], positions_N=output.positions_N[rows], slots_N=output.slots_N[rows]
            )

    def _take(self, emission: Emission) -> int:
        """Hand tokens to their sequence. A failure here (a tokenizer's, say) ends that request alone."""
        sequence = emission.sequence
        if emission.error:
            sequence.end("error", error=emission.error)
            return 0
        if not emission.token_ids:
            return 0
        try:
            return sequence.take(emission.token_ids, emission.logprobs)
        except Exception as error:
            logger.exception("request %s failed", sequence.request.request_id)
            sequence.finish_reason = None
            sequence.end("error", error=f"{type(error).__name__}: {error}")
            return 0

    def _commit_one(self, emission: Emission, num_kept: int, changed: dict[str, RequestGroup]) -> None:
        sequence, request = emission.sequence, emission.sequence.request
        group = self._group_of[request.request_id]
        if sequence.finish_reason == "error":
            self._scheduler.finish(request, "error")
        else:
            from_prefill = emission.num_offered < 0
            self._scheduler.commit(
                request,
                num_new_computed=emission.num_computed if from_prefill else num_kept,
                new_token_ids=emission.token_ids[:num_kept],
                finish_reason=sequence.finish_reason,
            )
            self._count(emission, num_kept)
        if num_kept or sequence.finish_reason is not None:
            group.note_token()
            changed[group.request_id] = group
        if sequence.finish_reason is not None:
            self._forget(sequence)

    def _count(self, emission: Emission, num_kept: int) -> None:
        self._num_generated_tokens += num_kept
        if emission.num_offered < 0:
            self._num_prompt_tokens += emission.sequence.count_prompt_tokens(emission.num_computed)
            return
        if not emission.is_round:
            self._num_undrafted_tokens += num_kept
            return
        accepted = min(num_kept, len(emission.token_ids) - 1)
        for spec in (self._spec, emission.sequence.spec):
            spec.add_round(offered=emission.num_offered, accepted=accepted, emitted=num_kept)

    # ---- bookkeeping

    # ---- the rest of ``Engine``, simple where there is one process

    def wait(self) -> None:
        self._interrupted.wait()
        self._interrupted.clear()

    def interrupt(self) -> None:
        self._interrupted.set()

    def rank_stats(self) -> tuple[EngineStats, ...]:
        return (self.stats(),)

    def close(self) -> None:
        for request_id in list(self._groups):
            self.abort(request_id)

    def _new_sequence(self, group: RequestGroup, index: int, *, seed: int) -> Sequence:
        request = Request.create(
            request_id=f"{group.request_id}/{index}",
            prompt_token_ids=group.prompt_token_ids,
            params=group.params,
            arrival_time=group.arrival_time,
            max_model_len=self.config.max_model_len,
        )
        return Sequence(
            index=index,
            request=request,
            seed=seed,
            tokenizer=self.tokenizer,
            eos_token_ids=self._eos_token_ids,
        )

    def _forget(self, sequence: Sequence) -> None:
        """Drop what the core holds of an ended sequence; its group goes with the last of them."""
        request_id = sequence.request.request_id
        group = self._group_of.pop(request_id)
        del self._sequences[request_id]
        # Not ``group.finished``: that is true already when the first of several ends in the same step as the last.
        if not any(member.request.request_id in self._group_of for member in group.sequences):
            del self._groups[group.request_id]

    def stats(self) -> EngineStats:
        scheduler, kv_cache = self._scheduler, self._scheduler.kv_cache
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_blocks_total=kv_cache.num_total,
            kv_blocks_free=kv_cache.num_free,
            prompt_tokens_total=self._num_prompt_tokens,
            generation_tokens_total=self._num_generated_tokens,
            requests_finished={str(reason): count for reason, count in scheduler.num_finished.items()},
            preemptions_total=scheduler.num_preemptions_total,
            prefix_cache_queries=kv_cache.num_queried_tokens,
            prefix_cache_hits=kv_cache.num_hit_tokens,
            spec=self._spec.snapshot(),
            undrafted_tokens_total=self._num_undrafted_tokens,
            steps_total=self._num_steps,
            graph_replays_total=self._graphs.num_replays,
            expert_load=self._expert_load.snapshot(),
            expert_parallel_size=self._expert_load.expert_parallel_size,
        )


def _index(rows: Seq[int]) -> slice | torch.Tensor:
    """Of ascending rows: a slice where they follow one another, as those of one request do; it copies nothing."""
    if not rows:
        return slice(0)
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)
