"""Text to token ids and back, chat templates, and text deltas of a growing output.

``Tokenizer`` wraps a fast tokenizer, whichever checkpoint format it came from. ``IncrementalDetokenizer`` turns pushed
ids into text deltas whose concatenation is exactly the decoding of all ids at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer

from outrider.errors import CheckpointError, InvalidRequestError
from outrider.models.tokenizer_gguf import tokenizer_from_metadata

ChatMessage = Mapping[str, Any]  # at least "role" and "content"
_REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


class FastTokenizer(Protocol):
    """What is used of transformers' ``PreTrainedTokenizerFast``."""

    @property
    def backend_tokenizer(self) -> BackendTokenizer: ...

    @property
    def chat_template(self) -> object: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...

    def save_pretrained(self, directory: Path) -> object: ...


class Tokenizer:
    def __init__(self, fast: FastTokenizer, *, eos_token_ids: tuple[int, ...]) -> None:
        self._fast = fast
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = len(fast)  # ids are 0..vocab_size-1, added tokens included
        self.special_token_ids: frozenset[int] = frozenset(
            [i for i, token in fast.added_tokens_decoder.items() if token.special] + list(fast.all_special_ids)
        )
        self.byte_token_ids: frozenset[int] = _byte_token_ids(fast)

    @classmethod
    def from_directory(cls, directory: Path, *, eos_token_ids: tuple[int, ...]) -> Tokenizer:
        """From an HF model directory; no code of the directory is run."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # a slow import that GGUF files do without

        try:
            fast = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise whatever the malformed file led to
            raise CheckpointError(f"{directory}: the tokenizer cannot be loaded ({error})") from error
        if not isinstance(fast, PreTrainedTokenizerFast):
            raise CheckpointError(f"{directory}: no fast tokenizer (tokenizer.json); found {type(fast).__name__}")
        return cls(fast, eos_token_ids=eos_token_ids)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, eos_token_ids: tuple[int, ...]) -> Tokenizer:
        """From the metadata of a GGUF file."""
        return cls(tokenizer_from_metadata(metadata), eos_token_ids=eos_token_ids)

    def save(self, directory: Path) -> None:
        """Write the files that ``from_directory`` reads, the chat template included."""
        self._fast.save_pretrained(directory)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # from bytes of an argument or a file that are no UTF-8, say
            raise InvalidRequestError(
                f"prompt: {text[error.start]!r} at index {error.start} is half a surrogate pair, which is no character",
                param="prompt",
            ) from error
        return self._fast.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._fast.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def has_chat_template(self) -> bool:
        return self._fast.chat_template is not None

    def apply_chat_template(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The prompt text of a conversation. The template's own complaints are the request's error."""
        if not self.has_chat_template:
            raise InvalidRequestError("the model has no chat template; use a plain prompt", param="messages")
        try:
            return self._fast.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # a template may fail on any message it does not expect
            raise InvalidRequestError(f"the chat template rejects the messages: {error}", param="messages") from error

    def encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> list[int]:
        """Token ids of ``apply_chat_template``; the template writes the special tokens itself."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        token_id: int | None = self._fast.backend_tokenizer.token_to_id(token)
        return token_id

    def id_to_token(self, token_id: int) -> str:
        """The vocabulary's spelling; the empty string for an id the tokenizer does not have."""
        token: str | None = self._fast.backend_tokenizer.id_to_token(token_id)
        return token if token is not None else ""

    def id_to_text(self, token_id: int) -> str:
        """One token decoded alone, special tokens shown; a part of a character becomes U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)


class IncrementalDetokenizer:
    """Text deltas of an output that grows by any number of tokens at a time.

    Invariant: what was returned so far, plus ``flush()``, equals ``decode`` of all ids pushed. Text is held back from
    an incomplete character on, so a returned delta is never revised. Where the vocabulary has byte tokens, a decoder
    judges a run of them as a whole (one bad byte spoils them all), so an unfinished run is held back too.

    Only a window of recent ids is decoded. It starts at a place where the text was complete, and one such stretch
    earlier than the text still growing, so that what a decoder does at the very start of a text happens in a part
    that has been returned already.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._window_start = 0
        self._complete_end = 0  # ids before here make complete text
        self._returned = 0  # characters of the window's text returned so far
        self._run_ids = tokenizer.byte_token_ids  # what prolongs a run; skipped tokens do not interrupt it
        if self._run_ids and skip_special_tokens:
            self._run_ids |= tokenizer.special_token_ids
        self.text = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that became final."""
        self._ids.extend(token_ids)
        end = len(self._ids)
        while end > self._complete_end and self._ids[end - 1] in self._run_ids:
            end -= 1
        window = self._decode(self._window_start, end)
        final = window.rstrip(_REPLACEMENT)
        delta = final[self._returned :]
        self._returned = max(self._returned, len(final))
        if delta and final == window:
            self._window_start, self._complete_end = self._complete_end, end
            self._returned = len(self._decode(self._window_start, end))
        self.text += delta
        return delta

    def flush(self) -> str:
        """The held-back rest, an incomplete character as U+FFFD; nothing is pushed after it."""
        delta = self._decode(0, len(self._ids))[len(self.text) :]
        self.text += delta
        return delta

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip_special_tokens)


def _byte_token_ids(fast: FastTokenizer) -> frozenset[int]:
    """Ids of ``<0x00>`` ... ``<0xFF>`` where the decoder takes them for bytes; empty for byte-level BPE."""
    decoder = fast.backend_tokenizer.decoder
    if decoder is None or b"ByteFallback" not in decoder.__getstate__():
        return frozenset()
    candidates = (fast.backend_tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in candidates if token_id is not None)
