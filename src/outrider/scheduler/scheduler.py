"""Continuous batching, first come first served: which requests run in the next step, with how many tokens each.

One step's token budget goes to decode rows first (each costs its verify width), then to prefill chunks of running
requests, then to new ones. What a request computes in a round never depends on the others: its verify window is
``1 + num_speculative_tokens`` rows, shortened by the context limit alone, never by budget or memory. Where more than
``speculative_disable_by_batch_size`` requests run it is one row, but only for those whose tokens cannot tell, as they
do not ``Request.needs_drafts``. A decode that does not fit in the budget waits for the next step, the longest-waiting
ones going first. One that finds no block preempts the youngest running request, itself if need be; that one goes to
the front of the queue and later computes all its tokens but the anchor again, so its rounds continue where they were
cut.

Why it never stalls: the oldest request is never preempted, and ``add`` refuses every request that could not reach its
full length with the whole pool to itself. So the oldest always moves on, nothing is cut short for lack of memory, and
``schedule`` returns an empty output only when there is no request.

State changes with ``commit``, not with ``schedule``: a scheduled row that was not run is simply scheduled again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import ConfigError, InvalidRequestError
from outrider.kv_cache.manager import KVCacheManager
from outrider.outputs import FinishReason
from outrider.scheduler.admission import LengthRules, require_room
from outrider.scheduler.output import DecodeRow, PrefillChunk, SchedulerOutput
from outrider.scheduler.request import Request, RequestStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # running requests
    max_num_batched_tokens: int  # rows of one step, verify rows and prefill tokens together
    enable_chunked_prefill: bool
    max_model_len: int  # context limit: prompt and output of one request
    max_waiting: int  # queued requests; one more is refused
    speculative_disable_by_batch_size: int = 0  # where more run, only requests that need drafts get them; 0: all do

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.speculative_disable_by_batch_size < 0:
            raise ConfigError(
                f"speculative_disable_by_batch_size={self.speculative_disable_by_batch_size} must not be negative"
            )
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len={self.max_model_len} must be at least 2: one prompt and one new token")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_model_len={self.max_model_len} where enable_chunked_prefill is false: "
                "a prompt is computed in one step"
            )


class Scheduler:
    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, *, num_speculative_tokens: int) -> None:
        if num_speculative_tokens < 0:
            raise ConfigError(f"num_speculative_tokens={num_speculative_tokens} must not be negative")
        window = min(1 + num_speculative_tokens, config.max_model_len)
        if config.max_num_batched_tokens < window:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} must be at least {window}: "
                f"the verify width with num_speculative_tokens={num_speculative_tokens}"
            )
        self.config = config
        self.kv_cache = kv_cache
        self.num_speculative_tokens = num_speculative_tokens
        self._lengths = LengthRules(
            max_model_len=config.max_model_len,
            num_speculative_tokens=num_speculative_tokens,
            kv_block_size=kv_cache.kv_block_size,
            num_kv_blocks=kv_cache.num_total,
        )
        self.num_preemptions_total = 0
        self.num_finished: Counter[FinishReason] = Counter()
        # Both oldest first, and whoever runs is older than all who wait: only the youngest is ever sent back.
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}  # every unfinished one
        self._next_arrival = 0
        self._next_turn = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Queued requests, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def get(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        return self._requests.get(request_id)

    def add(self, *requests: Request) -> None:
        """Queue new requests, all or none. Raises InvalidRequestError or QueueFullError and then leaves no trace."""
        for request in requests:
            if request.request_id in self._requests:
                raise InvalidRequestError(f"request_id={request.request_id!r} is in use already", param="request_id")
            self._check_can_finish(request)
        self.require_room(len(requests))
        for request in requests:
            request.arrival_index = self._next_arrival
            self._next_arrival += 1
            self._requests[request.request_id] = request
            self._waiting.append(request)

    def require_room(self, count: int) -> None:
        """Raise QueueFullError unless ``count`` more requests may wait."""
        require_room(count, num_waiting=len(self._waiting), max_waiting=self.config.max_waiting)

    def _check_can_finish(self, request: Request) -> None:
        self._lengths.check(num_prompt_tokens=request.num_prompt_tokens, max_total_tokens=request.max_total_tokens)

    def _decode_row(self, request: Request, *, crowded: bool) -> DecodeRow:
        if crowded and not request.needs_drafts:
            return DecodeRow(request=request, verify_width=1, drafting=False)
        return DecodeRow(request=request, verify_width=self._lengths.verify_width(request.num_tokens - 1))

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's rows and give them their slots."""
        preempted: list[Request] = []
        crowded = 0 < self.config.speculative_disable_by_batch_size < len(self._running)
        rows, budget = self._schedule_decodes(preempted, crowded=crowded)
        chunks: list[PrefillChunk] = []
        for request in self._running:
            if not request.is_decoding:
                budget -= self._append_chunk(chunks, request, budget)
        if not preempted:  # else the first in the queue has just lost its blocks, and cannot have them back yet
            self._admit(rows, chunks, budget, crowded=crowded)
        rows.sort(key=lambda row: row.request.arrival_index)
        return SchedulerOutput(prefills=tuple(chunks), decodes=tuple(rows), preempted=tuple(preempted))

    def _schedule_decodes(self, preempted: list[Request], *, crowded: bool) -> tuple[list[DecodeRow], int]:
        """The decode rows of running requests, and the budget they leave. Appends whom it preempts."""
        decoding = [self._decode_row(r, crowded=crowded) for r in self._running if r.is_decoding]
        budget = self.config.max_num_batched_tokens
        if sum(row.verify_width for row in decoding) > budget:
            decoding.sort(key=lambda row: (row.request.last_turn, row.request.arrival_index))
        rows: dict[str, DecodeRow] = {}
        for row in decoding:
            request, width = row.request, row.verify_width
            if request.status is not RequestStatus.RUNNING:  # preempted by an earlier one in this loop
                continue
            if width > budget:
                break  # not a narrower one instead: whoever waited longest goes first
            while not self.kv_cache.allocate(request.block_ids, request.num_computed_tokens + width):
                victim = self._running[-1]
                revoked = rows.pop(victim.request_id, None)
                budget += revoked.verify_width if revoked else 0
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                rows[request.request_id] = row
                budget -= width
        for row in rows.values():
            self._take_turn(row.request)
        return list(rows.values()), budget

    def _take_turn(self, request: Request) -> None:
        request.last_turn = self._next_turn
        self._next_turn += 1

    def _append_chunk(self, chunks: list[PrefillChunk], request: Request, budget: int) -> int:
        """Append the request's next chunk if the budget has room for it; the tokens it costs."""
        start, end = request.num_computed_tokens, request.prefill_end
        length = min(end - start, budget)
        if length == 0 or (length < end - start and not self.config.enable_chunked_prefill):
            return 0
        samples = start + length == end and not request.output_token_ids
        chunks.append(PrefillChunk(request=request, start=start, length=length, samples=samples))
        return length

    def _admit(self, rows: list[DecodeRow], chunks: list[PrefillChunk], budget: int, *, crowded: bool) -> None:
        """Start waiting requests in order while seats, blocks and budget last."""
        while self._waiting and len(self._running) < self.config.max_num_seqs and budget > 0:
            request = self._waiting[0]
            tokens = request.tokens_between(0, request.num_tokens)
            matched, num_matched = self.kv_cache.match_prefix(tokens)
            end = request.prefill_end
            if not self.config.enable_chunked_prefill and end - num_matched > budget:
                break
            row = self._decode_row(request, crowded=crowded)
            width = row.verify_width if request.output_token_ids else 0
            if width > budget and num_matched == end:
                break  # nothing to prefill, and its decode row has no room
            # All of the prefill is allocated now, so that only decodes ever run short of blocks. One block more for
            # each running request, and the first window of a resumed one, must be left: else it would soon be
            # preempted again, its prefill lost. With nothing else running the whole pool is enough by ``add``'s rule.
            window_blocks = self.kv_cache.num_blocks_for(end + width) - self.kv_cache.num_blocks_for(end)
            if not self.kv_cache.acquire(
                request.block_ids,
                matched_block_ids=matched,
                num_tokens=end,
                num_spare_blocks=window_blocks + len(self._running),
            ):
                break
            self._start(request, num_matched)
            if request.is_decoding:
                grown = self.kv_cache.allocate(request.block_ids, end + width)
                assert grown
                self._take_turn(request)
                rows.append(row)
                budget -= width
            else:
                budget -= self._append_chunk(chunks, request, budget)

    def _start(self, request: Request, num_matched: int) -> None:
        self._waiting.popleft()
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_matched
        if not request.output_token_ids:
            request.num_cached_tokens = num_matched
        if request.num_preemptions == 0:  # a request's own blocks found again are no hit
            self.kv_cache.count_lookup(num_queried=request.num_prompt_tokens, num_hit=num_matched)
        assert not self._running or self._running[-1].arrival_index < request.arrival_index
        self._running.append(request)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.kv_cache.free(request.block_ids)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.num_preemptions_total += 1
        self._waiting.appendleft(request)

    def commit(
        self,
        request: Request,
        *,
        num_new_computed: int,
        new_token_ids: Sequence[int],
        finish_reason: FinishReason | None,
    ) -> None:
        """Record what a row of the step gave.

        num_new_computed: tokens from the frontier on whose target KV and draft context are final. new_token_ids: what
        was emitted; for a chunk () or the first token, for a round as many as were computed (the anchor and the
        accepted drafts kept give one token each).
        """
        assert request.status is RequestStatus.RUNNING, f"commit of {request.request_id}, which is {request.status}"
        old_frontier, frontier = request.num_computed_tokens, request.num_computed_tokens + num_new_computed
        assert num_new_computed >= 1, num_new_computed
        if request.is_decoding:
            num_expected = num_new_computed
        else:
            assert frontier <= request.prefill_end, (frontier, request.prefill_end)
            num_expected = 1 if frontier == request.prefill_end and not request.output_token_ids else 0
        assert len(new_token_ids) == num_expected, (len(new_token_ids), num_expected)
        assert frontier <= len(request.block_ids) * self.kv_cache.kv_block_size, (frontier, len(request.block_ids))
        request.output_token_ids.extend(new_token_ids)
        request.num_computed_tokens = frontier
        assert request.num_tokens <= request.max_total_tokens, (request.num_tokens, request.max_total_tokens)
        self._cache_committed(request, old_frontier)
        if finish_reason is not None:
            self.finish(request, finish_reason)
        elif request.is_decoding:
            assert request.num_tokens < request.max_total_tokens, "a request at its full length must end"
            self.kv_cache.trim(request.block_ids, frontier)  # slots of rejected drafts

    def _cache_committed(self, request: Request, old_frontier: int) -> None:
        """Register the blocks that filled up between the old frontier and the current one."""
        size = self.kv_cache.kv_block_size
        first_block, end_block = old_frontier // size, request.num_computed_tokens // size
        if end_block > first_block:
            tokens = request.tokens_between(first_block * size, end_block * size)
            self.kv_cache.cache_full_blocks(request.block_ids, first_block=first_block, token_ids=tokens)

    def abort(self, request_id: str) -> Request | None:
        """End a request wherever it stands; None if there is no unfinished one of this id. Between steps only."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request and free all it holds."""
        assert self._requests.get(request.request_id) is request, f"{request.request_id} is not unfinished here"
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self.kv_cache.free(request.block_ids)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self.num_finished[reason] += 1
