"""Which requests can finish at all: a pure rule of lengths, the same wherever a request is looked at.

The scheduler applies it to what it queues; a front process applies it before it hands a request to a rank, so that bad
input is refused at once and in the same words. A request that passes can finish with the whole KV pool to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import InvalidRequestError, QueueFullError

if TYPE_CHECKING:
    from outrider.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRules:
    max_model_len: int  # context limit: prompt and output of one request
    num_speculative_tokens: int
    kv_block_size: int
    num_kv_blocks: int

    def verify_width(self, anchor_position: int) -> int:
        """Rows of a round whose anchor is there: the context limit alone shortens it."""
        return min(1 + self.num_speculative_tokens, self.max_model_len - anchor_position)

    def check(self, *, num_prompt_tokens: int, max_total_tokens: int) -> None:
        """Raise InvalidRequestError unless a request of these lengths can finish."""
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt has 0 tokens; at least 1 is needed", param="prompt")
        if num_prompt_tokens + 1 > self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens; with one new token it exceeds "
                f"max_model_len={self.max_model_len}",
                param="prompt",
            )
        assert num_prompt_tokens < max_total_tokens <= self.max_model_len, (num_prompt_tokens, max_total_tokens)
        num_slots = num_prompt_tokens  # the first output token needs no slot: it comes from the prefill
        if max_total_tokens > num_prompt_tokens + 1:
            last_anchor = max_total_tokens - 2  # the highest position at which a round can start
            num_slots = last_anchor + self.verify_width(last_anchor)
        num_blocks = -(-num_slots // self.kv_block_size)
        if num_blocks > self.num_kv_blocks:
            raise InvalidRequestError(
                f"prompt of {num_prompt_tokens} tokens with up to {max_total_tokens - num_prompt_tokens} new ones "
                f"needs {num_blocks} KV blocks of {self.kv_block_size} tokens; the KV memory has "
                f"{self.num_kv_blocks}: ask for fewer max_tokens or give the engine more KV memory",
                param="max_tokens",
            )


def max_total_tokens(params: SamplingParams, *, num_prompt_tokens: int, max_model_len: int) -> int:
    """Prompt and output together at which a sequence ends, clamped to the context limit."""
    if params.max_tokens is None:
        return max_model_len
    return min(max_model_len, num_prompt_tokens + params.max_tokens)


def require_room(count: int, *, num_waiting: int, max_waiting: int) -> None:
    """Raise QueueFullError unless ``count`` more sequences may wait."""
    if num_waiting + count > max_waiting:
        more = f" and {count} more come together" if count > 1 else ""
        raise QueueFullError(f"{num_waiting} requests wait already{more}; max_waiting={max_waiting}")
