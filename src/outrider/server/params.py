"""From a checked request to ``SamplingParams``, with errors that use the request's spelling of a parameter."""

from __future__ import annotations

from typing import Any

from outrider.errors import InvalidRequestError
from outrider.sampling_params import SamplingParams
from outrider.server.errors import bad_request
from outrider.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from outrider.server.validation import show

MAX_N = 128
MAX_STOPS = 64  # every token's text is searched for each of them, while all other requests wait
_LONGEST_MESSAGE = 500  # a refusal may quote a value of megabytes

_SAME_MEANING = (
    "n", "temperature", "top_p", "seed", "max_tokens", "stop", "presence_penalty", "frequency_penalty", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens",
)  # fmt: skip


def completion_params(request: CompletionRequest, *, vocab_size: int) -> SamplingParams:
    given = _given(request)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
    return _build(given, spelled={}, vocab_size=vocab_size)


def chat_params(request: ChatCompletionRequest, *, vocab_size: int) -> SamplingParams:
    """Without a limit a chat answer may run to the end of the context, as OpenAI's does."""
    given = _given(request)
    spelled = {"logprobs": "top_logprobs"}
    limit = request.max_completion_tokens
    if limit is not None:
        if request.max_tokens not in (None, limit):
            raise bad_request(
                f"max_completion_tokens={limit} contradicts max_tokens={request.max_tokens}, its former name; give one",
                param="max_completion_tokens",
            )
        spelled["max_tokens"] = "max_completion_tokens"
    given["max_tokens"] = limit if limit is not None else request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request(f"top_logprobs={request.top_logprobs} needs logprobs=true", param="top_logprobs")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    return _build(given, spelled=spelled, vocab_size=vocab_size)


def _given(request: GenerationRequest) -> dict[str, Any]:
    """What the request sets, by ``SamplingParams``' names; what it leaves open keeps that class's default."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed with stream=true", param="stream_options")
    if request.n is not None and request.n > MAX_N:
        raise bad_request(f"n={request.n} must lie in 1..{MAX_N}", param="n")
    if isinstance(request.stop, list) and len(request.stop) > MAX_STOPS:
        raise bad_request(f"stop has {len(request.stop)} strings; at most {MAX_STOPS} are allowed", param="stop")
    given = {name: getattr(request, name) for name in _SAME_MEANING if getattr(request, name) is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    return given


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise bad_request(f"logit_bias has the key {show(key)}; keys must be token ids", param="logit_bias")
        by_id[int(key)] = value
    return by_id


def _build(given: dict[str, Any], *, spelled: dict[str, str], vocab_size: int) -> SamplingParams:
    try:
        params = SamplingParams(**given)
        params.validate_for(vocab_size)
    except InvalidRequestError as error:
        message, param = str(error), error.param
        for ours, theirs in spelled.items():
            message = message.replace(ours, theirs)
            param = theirs if param == ours else param
        raise bad_request(message[:_LONGEST_MESSAGE], param=param) from None
    return params
