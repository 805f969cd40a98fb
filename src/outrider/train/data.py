"""The run's data: what the target said, with the tapped features it had while saying it, in bounded memory maps.

Contract: ``TokenStore`` holds whole sequences back to back. Row t holds token t and what the target computed from
tokens 0..t: the tapped features, the hidden state after the final norm, and the log-sum-exp over the full vocabulary
of the logits made from it, so that row t is the teacher of token t + 1. ``answer`` marks tokens the target sampled as
answer (its end-of-turn token included). The last row of a sequence was sampled but never run: its features are zero
and its log-sum-exp is +inf, so that it teaches nothing; rows before the answer may have +inf there too. Files are raw
and preallocated for ``capacity`` rows; the index is rewritten after every flush, so an interrupted run keeps what it
had.

Shape legend: N rows of one sequence, C capacity, F tapped width, D hidden size.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreShape:
    capacity: int  # C
    tap_width: int  # F
    hidden_size: int  # D


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One sequence of the store: rows start..stop, sampled at ``temperature``."""

    start: int
    stop: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """One finished sequence as it goes into the store."""

    tokens_N: Tensor  # int64
    answer_N: Tensor  # bool
    taps_NF: Tensor
    hidden_ND: Tensor
    lse_N: Tensor  # fp32
    temperature: float


class TokenStore:
    def __init__(self, folder: Path, shape: StoreShape, spans: list[Span]) -> None:
        self.folder = folder
        self.shape = shape
        self.spans = spans
        rows = shape.capacity
        self.tokens_C = self._map("tokens", torch.int32, rows)
        self.answer_C = self._map("answer", torch.uint8, rows)
        self.lse_C = self._map("lse", torch.float32, rows)
        self.taps_CF = self._map("taps", torch.bfloat16, rows * shape.tap_width).view(rows, shape.tap_width)
        self.hidden_CD = self._map("hidden", torch.bfloat16, rows * shape.hidden_size).view(rows, shape.hidden_size)

    @classmethod
    def create(cls, folder: Path, shape: StoreShape) -> TokenStore:
        if (folder / "index.json").exists():
            raise ConfigError(f"output: {folder} already holds generated data; use --resume or another directory")
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, shape, [])

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        try:
            index = json.loads((folder / "index.json").read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"data: {folder} holds no index.json; generate data first") from error
        return cls(folder, StoreShape(**index["shape"]), [Span(**span) for span in index["spans"]])

    def _map(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        path = self.folder / f"{name}.bin"
        if not path.exists():
            path.touch()
        os.truncate(path, size * dtype.itemsize)  # sparse until written
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype)

    @property
    def used(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @property
    def answer_tokens(self) -> int:
        return int(self.answer_C[: self.used].sum())

    def append(self, rows: SequenceRows) -> bool:
        """Copy one sequence in; False (and nothing written) when it no longer fits."""
        start, stop = self.used, self.used + rows.tokens_N.shape[0]
        if stop > self.shape.capacity:
            return False
        self.tokens_C[start:stop] = rows.tokens_N.to(torch.int32)
        self.answer_C[start:stop] = rows.answer_N.to(torch.uint8)
        self.taps_CF[start:stop] = rows.taps_NF.to(torch.bfloat16)
        self.hidden_CD[start:stop] = rows.hidden_ND.to(torch.bfloat16)
        self.lse_C[start:stop] = rows.lse_N
        self.taps_CF[stop - 1] = 0
        self.hidden_CD[stop - 1] = 0
        self.lse_C[stop - 1] = torch.inf
        self.spans.append(Span(start=start, stop=stop, temperature=rows.temperature))
        return True

    def flush(self) -> None:
        """Write the index; a reader sees every sequence appended so far."""
        index = {"shape": asdict(self.shape), "spans": [asdict(span) for span in self.spans]}
        temporary = self.folder / "index.json.tmp"
        temporary.write_text(json.dumps(index))
        temporary.replace(self.folder / "index.json")
