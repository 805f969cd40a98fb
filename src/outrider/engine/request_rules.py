"""What a request must fulfil before any engine takes it: one set of checks for an engine core and for a front process.

A front that has checked a request may hand it to a rank and answer its caller at once; the rank checks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.errors import InvalidRequestError
from outrider.sampling_params import SamplingParams
from outrider.scheduler.admission import LengthRules, max_total_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRules:
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    lengths: LengthRules

    @classmethod
    def of(cls, config: EngineConfig, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> RequestRules:
        lengths = LengthRules(
            max_model_len=config.max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
            kv_block_size=config.kv_block_size,
            num_kv_blocks=config.num_kv_blocks,
        )
        return cls(vocab_size=vocab_size, eos_token_ids=eos_token_ids, lengths=lengths)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise InvalidRequestError, naming what is wrong."""
        params.validate_for(self.vocab_size)
        if params.min_tokens and len({*self.eos_token_ids, *params.stop_token_ids}) == self.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: all {self.vocab_size} tokens end the text, so none can come before "
                f"min_tokens={params.min_tokens}",
                param="stop_token_ids",
            )
        wrong = next((i for i in prompt_token_ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"prompt: token id {wrong} must lie in 0..{self.vocab_size - 1} (vocab_size)", param="prompt"
            )
        self.lengths.check(
            num_prompt_tokens=len(prompt_token_ids),
            max_total_tokens=self.max_total_tokens(len(prompt_token_ids), params),
        )

    def max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        return max_total_tokens(params, num_prompt_tokens=num_prompt_tokens, max_model_len=self.lengths.max_model_len)
