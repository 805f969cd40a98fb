"""What a benchmark asks of an engine: prompts with their sampling parameters, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from outrider.bench.prompt_file import encode_prompt
from outrider.errors import ConfigError
from outrider.models.tokenizer import Tokenizer
from outrider.sampling_params import SamplingParams

# Short and long answers, prose, code, lists, sums, and one text that asks to be repeated.
BUILT_IN_PROMPTS = (
    "Explain to a ten-year-old why the moon seems to change its shape over a month.",
    "Write a Python function that returns the longest word of a sentence, with two examples of its use.",
    "List eight things to check before a long bicycle tour, one line each.",
    "A baker sells 36 rolls in the morning and twice as many in the afternoon. How many rolls is that? Show the steps.",
    "Write a polite letter to a neighbour whose dog barks at night.",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "Correct the mistakes and repeat the whole text: Yesterday me and my sister goed to the market and buyed five "
    "apple, two bread and a big bag of potatos for we grandmother.",
    "What are the differences between a virus and a bacterium, and which of them do antibiotics help against?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One prompt in the two forms that are needed: token ids for the Python API, text for a server."""

    text: str | None  # None: made of token ids
    chat: bool  # the text is a user's turn of a chat; False: it goes in as it is
    token_ids: tuple[int, ...]  # empty where the text goes to a server whose tokenizer is not at hand
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """Parameters of every request; request i gets the seed ``sampling_seed + i``."""

    max_tokens: int
    temperature: float
    top_p: float
    ignore_eos: bool
    sampling_seed: int

    def params(self, index: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            ignore_eos=self.ignore_eos,
            seed=self.sampling_seed + index,
        )


def requests_of_texts(
    texts: Sequence[str], plan: SamplingPlan, *, tokenizer: Tokenizer | None, raw: bool
) -> tuple[BenchRequest, ...]:
    """A request for each text. ``tokenizer`` None: they are for a server that has its own."""
    chat = not raw and (tokenizer is None or tokenizer.has_chat_template)
    return tuple(
        BenchRequest(
            text=text,
            chat=chat,
            token_ids=() if tokenizer is None else tuple(encode_prompt(tokenizer, text, raw=raw)),
            params=plan.params(index),
        )
        for index, text in enumerate(texts)
    )


def random_requests(
    num_requests: int, plan: SamplingPlan, *, input_len: int, tokenizer: Tokenizer
) -> tuple[BenchRequest, ...]:
    """Prompts of ``input_len`` random tokens each: right for timing prefill, no text that a drafter could follow."""
    if input_len < 1:
        raise ConfigError(f"input_len={input_len} must be at least 1")
    ordinary = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_token_ids]
    draws = np.random.default_rng(abs(plan.sampling_seed)).choice(ordinary, size=(num_requests, input_len))
    return tuple(
        BenchRequest(text=None, chat=False, token_ids=tuple(row.tolist()), params=plan.params(index))
        for index, row in enumerate(draws)
    )


def poisson_arrivals(num_requests: int, *, request_rate: float, seed: int) -> tuple[float, ...]:
    """Seconds from the start at which requests arrive: independent exponential gaps of mean 1 / ``request_rate``."""
    if not 0 < request_rate < float("inf"):
        raise ConfigError(f"request_rate={request_rate} must be finite and above 0")
    gaps = np.random.default_rng(abs(seed)).exponential(1 / request_rate, size=num_requests)
    return tuple(accumulate(gaps.tolist()))
