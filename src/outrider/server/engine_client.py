"""What the server and the chat terminal ask of an engine; the async engine is the one implementation outside tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from outrider.outputs import EngineStats, RequestOutput
from outrider.sampling_params import SamplingParams


class ChatTokenizer(Protocol):
    """The part of ``models.tokenizer.Tokenizer`` that turns a prompt into token ids."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Raises InvalidRequestError where the template rejects the messages."""
        ...


class AsyncEngineClient(Protocol):
    """An engine seen from an event loop; its methods are for that loop alone."""

    @property
    def model_name(self) -> str: ...

    @property
    def tokenizer(self) -> ChatTokenizer: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def healthy(self) -> bool:
        """False once the engine loop has ended by an error."""
        ...

    def generate(
        self, *, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative snapshots, the last with ``finished``. Closing or cancelling the generator aborts the request.

        Raises InvalidRequestError, QueueFullError or EngineDeadError, at the first step or later.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def rank_stats(self) -> tuple[EngineStats, ...]:
        """The same of each data-parallel rank."""
        ...

    async def shutdown(self, drain_s: float) -> None:
        """Let running requests finish for at most ``drain_s`` seconds, abort the rest and free everything."""
        ...
