"""A fast tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizer that the file names.

``GGUFTokenizer`` gives the ids and texts of a ``PreTrainedTokenizerFast`` over the same parts without transformers,
whose import costs a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from outrider.models.chat_template import ChatTemplate

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_PATTERNS = {
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
}
_SUPPORTED_PRE = ("default", "gpt-2", "smollm", *_SPLIT_PATTERNS)


class GGUFTokenizer:
    """What ``models.tokenizer`` asks of a fast tokenizer, under transformers' names."""

    def __init__(self, backend_tokenizer: Tokenizer, *, chat_template: str | None, named: Mapping[str, str]) -> None:
        """``named``: special tokens by what templates call them (``eos_token``, ...)."""
        self.backend_tokenizer = backend_tokenizer
        self.chat_template = chat_template
        self._named = dict(named)
        self._compiled: ChatTemplate | None = None

    def __len__(self) -> int:
        size: int = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        added: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    @property
    def all_special_ids(self) -> list[int]:
        found = (self.backend_tokenizer.token_to_id(token) for token in self._named.values())
        return [token_id for token_id in found if token_id is not None]

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, **_: bool) -> str:
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **_: bool
    ) -> str:
        if self._compiled is None:
            from outrider.models.chat_template import ChatTemplate  # Jinja: of no use to plain prompts

            assert self.chat_template is not None, "there is no chat template"
            self._compiled = ChatTemplate(self.chat_template, special_tokens=self._named)
        return self._compiled.render(messages, add_generation_prompt=add_generation_prompt)

    def save_pretrained(self, directory: Path) -> None:
        from transformers import PreTrainedTokenizerFast  # a slow import that only writing needs

        PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self._named,
        ).save_pretrained(directory)


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Build the tokenizer; the result carries the file's chat template and special tokens."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _SUPPORTED_PRE:
        raise CheckpointError(
            f"GGUF tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={pre!r} is not supported; "
            f"supported: model gpt2 with pre {', '.join(_SUPPORTED_PRE)}"
        )
    tokens: list[str] = _list_of(str, metadata, "tokens")
    types: list[int] = _list_of(int, metadata, "token_type")
    merges = [_merge(merge) for merge in _list_of(str, metadata, "merges")]
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"GGUF tokenizer.chat_template={template!r} must be a string")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(f"GGUF tokenizer: {len(tokens)} tokens but {len(types)} token types")
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(f"GGUF tokenizer: token {twice!r} appears more than once")
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the tokenizers library raises bare Exception, e.g. for a merge outside the vocabulary
        raise CheckpointError(f"GGUF tokenizer: {error}") from error
    named = _named_tokens(metadata, tokens)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, named)
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    # A token with a role is special whatever type the file gives it.
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named.values()])
    return GGUFTokenizer(tokenizer, chat_template=template, named=named)


def _list_of(kind: type, metadata: Mapping[str, Any], key: str) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{key}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(f"GGUF tokenizer.ggml.{key} must be an array of {kind.__name__}")
    return values


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in _SPLIT_PATTERNS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _merge(text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"GGUF tokenizer: merge {text!r} is not two tokens with a space between")
    return left, right


def _post_processor(metadata: Mapping[str, Any], named: Mapping[str, str]) -> processors.PostProcessor:
    """Adds the BOS token where the file says so."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return byte_level
    if "bos_token" not in named:
        raise CheckpointError("GGUF tokenizer: add_bos_token is true, but there is no bos_token_id")
    bos, bos_id = named["bos_token"], metadata["tokenizer.ggml.bos_token_id"]
    template = processors.TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)])
    return processors.Sequence([byte_level, template])


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    special = kind == _CONTROL
    return [
        AddedToken(token, special=special, normalized=False)
        for token, type_ in zip(tokens, types, strict=True)
        if type_ == kind
    ]


def _named_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """``bos_token``, ``eos_token``, ... as templates refer to them."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {}
    for key, name in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(f"GGUF tokenizer: {key}_token_id={token_id} must lie in 0..{len(tokens) - 1}")
        named[name] = tokens[token_id]
    return named
