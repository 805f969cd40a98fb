"""What a request may contain: OpenAI's parameters that this engine has a meaning for, and vLLM's extra ones.

Nothing is accepted and then ignored, with one exception: ``user``, which identifies the caller and asks for nothing.
An optional parameter given as null means its default. A description here is the type rule an error message quotes;
ranges are ``SamplingParams``' to check.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

INTEGER = "an integer"
NUMBER = "a finite number"
BOOLEAN = "true or false"
STRING = "a string"


class StrictModel(BaseModel):
    """Unknown fields are refused, and values are not converted: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    # OpenAI's names that mean nothing here: null, their default, is dropped; any other value is refused by name.
    unsupported: ClassVar[frozenset[str]] = frozenset()
    # Fields whose inner fields have names and rules of their own in an error message.
    nested: ClassVar[dict[str, type[StrictModel]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if not (v is None and k in cls.unsupported)}


class StreamOptions(StrictModel):
    unsupported = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(None, description=BOOLEAN)


class GenerationRequest(StrictModel):
    """Parameters that both endpoints share."""

    nested = {"stream_options": StreamOptions}

    model: str | None = Field(None, description="a string, the id of the served model")
    user: str | None = Field(None, description=STRING)
    stream: bool | None = Field(None, description=BOOLEAN)
    stream_options: StreamOptions | None = Field(None, description='an object such as {"include_usage": true}')

    n: int | None = Field(None, description=INTEGER)
    temperature: float | None = Field(None, description=NUMBER)
    top_p: float | None = Field(None, description=NUMBER)
    seed: int | None = Field(None, description=INTEGER)
    max_tokens: int | None = Field(None, description=INTEGER)
    stop: str | list[str] | None = Field(None, description="a string or a list of strings")
    presence_penalty: float | None = Field(None, description=NUMBER)
    frequency_penalty: float | None = Field(None, description=NUMBER)
    logit_bias: dict[str, float] | None = Field(None, description="an object from token ids to numbers")

    # vLLM's extra body parameters
    top_k: int | None = Field(None, description=INTEGER)
    min_p: float | None = Field(None, description=NUMBER)
    repetition_penalty: float | None = Field(None, description=NUMBER)
    min_tokens: int | None = Field(None, description=INTEGER)
    stop_token_ids: list[int] | None = Field(None, description="a list of integers")
    ignore_eos: bool | None = Field(None, description=BOOLEAN)
    include_stop_str_in_output: bool | None = Field(None, description=BOOLEAN)
    skip_special_tokens: bool | None = Field(None, description=BOOLEAN)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    unsupported = frozenset({"suffix", "best_of", "echo", "store", "metadata", "response_format", "prompt_logprobs"})

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a string, a list of strings, a list of token ids or a list of such lists"
    )
    logprobs: int | None = Field(None, description=INTEGER)
    echo: Literal[False] | None = Field(None, description="false: prompts are not echoed")
    best_of: Literal[1] | None = Field(None, description="1: candidates are not ranked; use n")


class TextPart(StrictModel):
    type: Literal["text"] = Field(description='"text": the models served take no other input')
    text: str = Field(description=STRING)


class ChatMessage(StrictModel):
    unsupported = frozenset({"name", "refusal", "tool_calls", "function_call", "audio", "annotations"})

    nested = {"content": TextPart}

    role: Literal["system", "developer", "user", "assistant"] = Field(
        description='one of "system", "developer", "user", "assistant"'
    )
    content: str | list[TextPart] = Field(description="a string or a list of text parts")

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """Chat templates of open models know no developer; it is OpenAI's later name for system."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


class ResponseFormat(StrictModel):
    type: Literal["text"] = Field(description='"text": output is not constrained')


class ChatCompletionRequest(GenerationRequest):
    unsupported = frozenset(
        {
            "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "store", "metadata", "audio",
            "modalities", "prediction", "reasoning_effort", "verbosity", "service_tier", "web_search_options",
            "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "moderation", "prompt_logprobs",
        }
    )  # fmt: skip
    nested = {**GenerationRequest.nested, "messages": ChatMessage}

    messages: list[ChatMessage] = Field(description="a list of messages with role and content")
    max_completion_tokens: int | None = Field(None, description=INTEGER)
    logprobs: bool | None = Field(None, description=BOOLEAN)
    top_logprobs: int | None = Field(None, description=INTEGER)
    response_format: ResponseFormat | None = Field(None, description='{"type": "text"}: output is not constrained')
