"""What a request asks of sampling and stopping (L0: no torch). Names, meanings and defaults are vLLM's.

A ``SamplingParams`` is checked whole when it is made and never changes afterwards; every violation is an
``InvalidRequestError`` whose ``param`` is the field's name. What needs the model's vocabulary is checked by
``validate_for``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequestError

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a temperature below this is greedy decoding
_SEED_MIN, _SEED_MAX = -(2**63), 2**64 - 1


class LogitBias(Mapping[int, float]):
    """An immutable, hashable, picklable map of token id to additive bias, in the order of token ids."""

    __slots__ = ("_items",)
    _items: dict[int, float]

    def __init__(self, items: Iterable[tuple[int, float]] = ()) -> None:
        self._items = dict(sorted(items))

    def __getitem__(self, token_id: int) -> float:
        return self._items[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return f"LogitBias({self._items!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0  # below GREEDY_BELOW: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # -2**63 .. 2**64 - 1, taken modulo 2**64; None: the engine draws one
    max_tokens: int | None = 16  # None: up to the context limit
    min_tokens: int = 0
    stop: Sequence[str] = ()  # a string or a list of strings; always a tuple once made
    stop_token_ids: Sequence[int] = ()  # always a tuple once made
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = LogitBias()
    logprobs: int | None = None  # None: off; k: the sampled token and the k most likely
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def __post_init__(self) -> None:
        _check_int("n", self.n, low=1)
        _check_float(self, "temperature", low=0.0)
        _check_float(self, "top_p", low=0.0, high=1.0, open_low=True)
        _check_int("top_k", self.top_k, low=-1)
        _check_float(self, "min_p", low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=_SEED_MIN, high=_SEED_MAX)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}", param="min_tokens"
            )
        _check_float(self, "presence_penalty", low=-2.0, high=2.0)
        _check_float(self, "frequency_penalty", low=-2.0, high=2.0)
        _check_float(self, "repetition_penalty", low=0.0, open_low=True)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name}={value!r} must be true or false", param=name)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    def validate_for(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name}: token id {token_id} must lie in 0..{vocab_size - 1} (vocab_size)", param=name
                    )


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    rule = f"at least {low}" if high is None else f"in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name}={value!r} must be an integer", param=name)
    if value < low or (high is not None and value > high):
        raise InvalidRequestError(f"{name}={value} must be {rule}", param=name)


def _check_float(
    params: SamplingParams, name: str, *, low: float, high: float = math.inf, open_low: bool = False
) -> None:
    """Check the field's range and store it as a float; ``open_low`` excludes the lower end."""
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name}={value!r} must be a number", param=name)
    above = value > low if open_low else value >= low
    if not (above and value <= min(high, sys.float_info.max)):  # NaN fails every comparison
        rule = f"{'above' if open_low else 'at least'} {low}" + ("" if math.isinf(high) else f" and at most {high}")
        raise InvalidRequestError(f"{name}={value} must be finite, {rule}", param=name)
    object.__setattr__(params, name, float(value))


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise InvalidRequestError(f"stop={stop!r} must be a string or a list of strings", param="stop")
    if "" in strings:
        raise InvalidRequestError(f"stop={stop!r} must not contain an empty string", param="stop")
    return tuple(strings)


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise InvalidRequestError(f"stop_token_ids={ids!r} must be a list of token ids", param="stop_token_ids")
    for token_id in ids:
        _check_int("stop_token_ids", token_id, low=0)
    return tuple(ids)


def _logit_bias(bias: object) -> LogitBias:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias={bias!r} must map token ids to numbers", param="logit_bias")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, low=0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequestError(
                f"logit_bias[{token_id}]={value!r} must be a number in -100..100", param="logit_bias"
            )
    return LogitBias((token_id, float(value)) for token_id, value in bias.items())
