"""What a caller gets back, and the counters that go with it (L0: no torch).

The meaning is vLLM's: ``token_ids`` include the stop token, ``text`` does not. Everything here is a snapshot: an
object once handed out is never changed afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    decoded: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    """Logprobs of one emitted token, from the raw logits before any processing."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]  # the requested number, most likely first; may repeat the sampled one


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    index: int  # 0..n-1
    text: str  # cumulative
    token_ids: tuple[int, ...]  # cumulative
    logprobs: tuple[PositionLogprobs, ...] | None  # None: not asked for; else one entry a token
    finish_reason: FinishReason | None  # None: still running
    stop_reason: int | str | None  # the stop token id or string that ended it, where one did
    error: str | None = None  # message, with finish_reason "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTiming:
    """Seconds since the request arrived; 0.0 where it has not happened yet."""

    queue_s: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounters:
    """Drafting counters: of a request, or of an engine since start.

    offered: drafts verified; accepted: drafts that became output; emitted: tokens emitted by rounds (bonus included).
    """

    rounds: int = 0
    offered: int = 0
    accepted: int = 0
    emitted: int = 0
    per_position: tuple[tuple[int, int], ...] = ()  # (offered, accepted) of draft 1, 2, ...

    @property
    def accepted_length(self) -> float:
        """Emitted tokens per round, the bonus token included; 0.0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    timing: RequestTiming = field(default_factory=RequestTiming)
    spec: SpecCounters = field(default_factory=SpecCounters)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """One snapshot for /metrics, the periodic log line and /stats."""

    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_free: int  # includes cached blocks that may be evicted
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_finished: dict[str, int]  # by finish reason
    preemptions_total: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found
    spec: SpecCounters
    steps_total: int
    undrafted_tokens_total: int = 0  # decoded without drafting because of the load; they belong to no round
    graph_replays_total: int = 0  # passes run from a captured tier
    expert_load: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by model: rows each expert computed
    expert_parallel_size: int = 1  # ranks that whole experts are spread over, in blocks of equal size
