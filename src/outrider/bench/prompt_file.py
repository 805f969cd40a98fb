"""Prompts for measuring: files of them, and their token ids.

A prompt file has one JSON object a line, ``{"turns": ["first question", ...]}``. Other keys and later turns mean
nothing here.
"""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import ConfigError
from outrider.models.tokenizer import Tokenizer


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """The first turn of the first ``limit`` lines (None: of all), empty lines left out.

    Raises ConfigError for a file that cannot be read or has no prompt, a limit below 1 and, by number, a bad line.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1")
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error}") from None
    prompts: list[str] = []
    for number, line in enumerate(lines, start=1):
        if len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_first_turn(line, where=f"prompt file {path}, line {number}"))
    if not prompts:
        raise ConfigError(f"prompt file {path} has no prompts")
    return prompts


def encode_prompt(tokenizer: Tokenizer, text: str, *, raw: bool) -> list[int]:
    """Token ids of one user message through the chat template; of the bare text with ``raw`` or without a template."""
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(text, add_special_tokens=True)
    return tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)


def _first_turn(line: str, *, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict) or "turns" not in record:
        raise ConfigError(f'{where}: must be an object with "turns", a list of texts')
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise ConfigError(f'{where}: "turns" must be a list of texts with at least one')
    if not turns[0].strip():
        raise ConfigError(f"{where}: the first turn is empty")
    return turns[0]
