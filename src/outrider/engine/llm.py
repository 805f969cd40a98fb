"""The offline API: ``LLM(model).generate(prompts, sampling_params)``, with the meaning of vLLM's.

``generate`` runs the step loop until all its requests have ended. With one rank that is all in this process; with more,
the ranks are processes, which ``close`` ends, or the ``with`` statement, or the end of the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tqdm import tqdm

from outrider.config import EngineArgs
from outrider.engine.engine import Engine
from outrider.engine.launch import make_engine
from outrider.errors import InvalidRequestError
from outrider.models.tokenizer import ChatMessage, Tokenizer
from outrider.outputs import EngineStats, RequestOutput
from outrider.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


OFFLINE_MAX_WAITING = 2**31  # a queue limit protects a server; a batch job brings all its prompts at once
Prompt = str | TextPrompt | TokensPrompt | Sequence[int]


class LLM:
    """An engine of one's own.

    Keyword arguments are the fields of ``EngineArgs`` (the flags of ``outrider serve``). Raises ConfigError or
    CheckpointError where they cannot run together.
    """

    def __init__(self, model: str = "smollm2-135m", **engine_args: Any) -> None:
        unknown = sorted(set(engine_args) - set(EngineArgs.__slots__))
        if unknown:
            raise TypeError(f"LLM() got unknown arguments {unknown}; known: {sorted(EngineArgs.__slots__)}")
        args: dict[str, Any] = {"max_num_waiting": OFFLINE_MAX_WAITING, **engine_args}
        self._core = make_engine(EngineArgs(model=model, **args))
        self._ids = itertools.count()

    @classmethod
    def from_core(cls, core: Engine) -> LLM:
        """Over an engine built elsewhere."""
        llm = cls.__new__(cls)
        llm._core = core
        llm._ids = itertools.count()
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def core(self) -> Engine:
        """The engine below: its ``step``, ``add_request`` and ``abort``, for callers that run the loop themselves."""
        return self._core

    def stats(self) -> EngineStats:
        return self._core.stats()

    def close(self) -> None:
        """End the engine and the processes of its ranks. May be called again."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts.

        prompts: a text, ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, a list of ids, or a list of these.
        sampling_params: one for all prompts, or one each; None: the defaults. All requests are checked before any
        runs; InvalidRequestError names the first that is wrong.
        """
        each = _as_list(prompts)
        params = _per_prompt(sampling_params, len(each))
        return self._run([(*self._encode(prompt), p) for prompt, p in zip(each, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """As ``generate``, over one conversation or several, through the model's chat template."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        params = _per_prompt(sampling_params, len(conversations))
        requests = []
        for conversation, p in zip(conversations, params, strict=True):
            text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt)
            requests.append((text, self.tokenizer.encode(text, add_special_tokens=False), p))
        return self._run(requests, use_tqdm)

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=True)
        if isinstance(prompt, Mapping):
            fields: Mapping[str, Any] = prompt
            if set(fields) == {"prompt"} and isinstance(fields["prompt"], str):
                return self._encode(fields["prompt"])
            if set(fields) == {"prompt_token_ids"}:
                return self._encode(fields["prompt_token_ids"])
            raise InvalidRequestError(
                f"prompt has the keys {sorted(fields)}; it takes exactly one of 'prompt' and 'prompt_token_ids'",
                param="prompt",
            )
        ids = list(prompt)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise InvalidRequestError("prompt must be a text or a list of integer token ids", param="prompt")
        return None, ids

    def _run(
        self, requests: Sequence[tuple[str | None, Sequence[int], SamplingParams]], use_tqdm: bool
    ) -> list[RequestOutput]:
        if self._core.has_unfinished:  # their snapshots would be lost in the loop below
            raise InvalidRequestError("requests added through LLM.core are unfinished: step them to their end first")
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for text, token_ids, params in requests:
                request_id = str(next(self._ids))
                self._core.add_request(request_id=request_id, prompt=text, prompt_token_ids=token_ids, params=params)
                ids.append(request_id)
            with tqdm(total=len(ids), desc="generate", unit="req", disable=not use_tqdm) as bar:
                while len(finished) < len(ids):
                    for output in self._core.step():
                        if output.finished:
                            finished[output.request_id] = output
                            bar.update()
        except BaseException:  # whatever it was: nothing of this call may be left for the next one
            for request_id in ids:
                self._core.abort(request_id)
            raise
        return [finished[request_id] for request_id in ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"sampling_params has {len(params)} entries for {count} prompts; give one, or one a prompt",
            param="sampling_params",
        )
    return list(params)
