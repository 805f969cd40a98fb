"""A conversation with an engine: history, slash commands, streaming and figures, free of any terminal.

Invariant: between turns ``history`` alternates user and assistant and fits the context together with an answer; the
system text, if any, is kept apart and never trimmed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.errors import InvalidRequestError, OutriderError
from outrider.outputs import RequestOutput, SpecCounters
from outrider.sampling_params import SamplingParams
from outrider.server.engine_client import AsyncEngineClient
from outrider.spec_decode.counters import merge_counters

HELP = """\
/stats        figures of this conversation
/reset        forget the conversation, keep the system text
/system TEXT  set the system text and forget the conversation; without TEXT, remove it
/help         this list
/exit         leave (or Ctrl-D); Ctrl-C stops the current answer
"""
# What an answer of no stated length is kept room for when old turns are dropped.
_ROOM_FOR_ANSWER = 512


@dataclass(slots=True)
class ChatTotals:
    """Figures over the answers so far, stopped ones included."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_tokens: int = 0  # all but each answer's first, of answers that were not stopped
    decode_s: float = 0.0
    last_ttft_s: float = 0.0
    spec: SpecCounters = field(default_factory=SpecCounters)

    def add(self, output: RequestOutput) -> None:
        num_tokens = len(output.outputs[0].token_ids)
        self.turns += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        self.completion_tokens += num_tokens
        if num_tokens:
            self.last_ttft_s = output.timing.ttft_s
        if output.finished and num_tokens:
            self.decode_tokens += num_tokens - 1
            self.decode_s += output.timing.e2e_s - output.timing.ttft_s
        self.spec = merge_counters((self.spec, output.spec))

    @property
    def tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class ChatSession:
    """``write`` receives everything a person is to read, answers piece by piece."""

    def __init__(
        self, engine: AsyncEngineClient, *, params: SamplingParams, system: str, write: Callable[[str], None]
    ) -> None:
        if not engine.tokenizer.has_chat_template:
            raise InvalidRequestError(f"the model {engine.model_name} has no chat template", param="model")
        self._engine = engine
        self._params = params
        self._system = system
        self._write = write
        self.history: list[dict[str, str]] = []
        self.totals = ChatTotals()

    @property
    def alive(self) -> bool:
        """Whether the engine can still answer."""
        return self._engine.healthy

    def write(self, text: str) -> None:
        self._write(text)

    def command(self, line: str) -> bool:
        """Carry out a line that begins with a slash; False: leave."""
        name, _, argument = line.partition(" ")
        match name:
            case "/exit":
                return False
            case "/help":
                self._write(HELP)
            case "/stats":
                self._write(self._stats())
            case "/reset":
                self.history.clear()
                self._write("[conversation forgotten]\n")
            case "/system":
                self._system = argument.strip()
                self.history.clear()
                self._write("[system text set]\n" if self._system else "[system text removed]\n")
            case _:
                self._write(f"[unknown command {name}; /help lists them]\n")
        return True

    async def answer(self, text: str) -> None:
        """Stream the answer to ``text``. Cancelled, it keeps in the history what was written so far."""
        self.history.append({"role": "user", "content": text})
        last: RequestOutput | None = None
        written = ""
        try:
            prompt, token_ids = self._fit()
            stream = self._engine.generate(
                prompt=prompt, prompt_token_ids=token_ids, params=self._params, request_id=f"chat-{uuid.uuid4().hex}"
            )
            async with aclosing(stream):
                async for last in stream:
                    delta = last.outputs[0].text[len(written) :]
                    self._write(delta)
                    written += delta
            self._write("\n")
            if last is not None and last.outputs[0].finish_reason == "error":
                self._write(f"[the answer failed: {last.outputs[0].error}]\n")
            elif last is not None and last.outputs[0].finish_reason == "length":
                self._write("[cut: the limit of tokens was reached]\n")
        except asyncio.CancelledError:
            self._write("\n[stopped]\n")
            raise
        except OutriderError as error:
            self._write(f"[{error}]\n")
        finally:
            if last is not None:
                self.totals.add(last)
            if written:
                self.history.append({"role": "assistant", "content": written})
            else:
                self.history.pop()  # an unanswered question would make the roles stop alternating

    def _fit(self) -> tuple[str, list[int]]:
        """The prompt of the conversation, after dropping the oldest turns that leave no room for an answer."""
        limit = self._engine.max_model_len
        room = min(self._params.max_tokens or _ROOM_FOR_ANSWER, limit // 2)
        prompt, token_ids = self._render()
        dropped = 0
        while len(token_ids) + room > limit and len(self.history) > 1:
            del self.history[:2]
            dropped += 1
            prompt, token_ids = self._render()
        if dropped:
            self._write(f"[context of {limit} tokens is full: the {dropped} oldest turns were dropped]\n")
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"the message makes a prompt of {len(token_ids)} tokens; at most {limit - 1} fit the context"
            )
        return prompt, token_ids

    def _render(self) -> tuple[str, list[int]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        prompt = self._engine.tokenizer.apply_chat_template([*system, *self.history], add_generation_prompt=True)
        return prompt, self._engine.tokenizer.encode(prompt, add_special_tokens=False)

    def _stats(self) -> str:
        totals = self.totals
        return (
            f"turns {totals.turns}, prompt tokens {totals.prompt_tokens}, answer tokens {totals.completion_tokens}\n"
            f"time to first token {totals.last_ttft_s * 1000:.0f} ms (last answer), "
            f"{totals.tokens_per_s:.1f} tokens/s\n"
            f"rounds {totals.spec.rounds}, accepted length {totals.spec.accepted_length:.2f}, "
            f"acceptance rate {totals.spec.acceptance_rate:.1%}\n"
        )
