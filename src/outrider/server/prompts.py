"""From a request's prompt to token ids that fit the context. Tokenising leaves the event loop free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from outrider.server.engine_client import AsyncEngineClient
from outrider.server.errors import bad_request
from outrider.server.protocol import ChatMessage
from outrider.server.validation import show

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    text: str | None  # None: given as token ids
    token_ids: tuple[int, ...]


class PromptEncoder:
    """Encodes on one thread of its own: tokenizers are not promised to be safe on several."""

    def __init__(self, engine: AsyncEngineClient, *, max_prompts: int) -> None:
        self._engine = engine
        self._max_prompts = max_prompts
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-tokenizer")

    async def completion(self, prompt: str | list[str] | list[int] | list[list[int]], *, n: int) -> list[Prompt]:
        if not prompt:
            raise bad_request(f"prompt={show(prompt)} is empty; at least one token is needed", param="prompt")
        prompts = _split(prompt)
        if len(prompts) > self._max_prompts:
            raise bad_request(
                f"prompt has {len(prompts)} prompts; at most {self._max_prompts} are allowed in a request",
                param="prompt",
                code="too_many_prompts",
                status=413,
            )
        if len(prompts) * n > self._max_prompts:
            raise bad_request(
                f"n={n} for {len(prompts)} prompts asks for {len(prompts) * n} sequences; "
                f"at most {self._max_prompts} are allowed in a request",
                param="n",
            )
        return [await self._prompt(item, param="prompt") for item in prompts]

    async def chat(self, messages: Sequence[ChatMessage]) -> list[Prompt]:
        if not messages:
            raise bad_request("messages=[] is empty; at least one message is needed", param="messages")
        tokenizer = self._engine.tokenizer
        if not tokenizer.has_chat_template:
            raise bad_request(
                f"messages: the model {show(self._engine.model_name)} has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        conversation = [message.for_template() for message in messages]
        text = await self._on_thread(lambda: tokenizer.apply_chat_template(conversation, add_generation_prompt=True))
        # The template writes the special tokens itself.
        ids = await self._on_thread(lambda: tokenizer.encode(text, add_special_tokens=False))
        return [self._checked(Prompt(text=text, token_ids=tuple(ids)), param="messages")]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _prompt(self, item: str | list[int], *, param: str) -> Prompt:
        if isinstance(item, str):
            ids = await self._on_thread(lambda: self._engine.tokenizer.encode(item, add_special_tokens=True))
            return self._checked(Prompt(text=item, token_ids=tuple(ids)), param=param)
        for token_id in item:
            if not 0 <= token_id < self._engine.vocab_size:
                raise bad_request(
                    f"{param} has the token id {token_id}; ids must lie in 0..{self._engine.vocab_size - 1}",
                    param=param,
                )
        return self._checked(Prompt(text=None, token_ids=tuple(item)), param=param)

    def _checked(self, prompt: Prompt, *, param: str) -> Prompt:
        limit = self._engine.max_model_len - 1
        if not prompt.token_ids:
            raise bad_request(f"{param} is empty; at least one token is needed", param=param)
        if len(prompt.token_ids) > limit:
            raise bad_request(
                f"{param} has {len(prompt.token_ids)} tokens; at most {limit} are allowed, since one more must fit "
                f"the context of {limit + 1}",
                param=param,
                code="context_length_exceeded",
            )
        return prompt

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _split(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """One entry per prompt. The request's model has established that a list is of one kind."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    if texts:
        return texts
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if isinstance(item, list)]
