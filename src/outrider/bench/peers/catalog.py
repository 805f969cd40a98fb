"""Which peers there are for a model, under which names, and why some cannot take part."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from outrider.bench.contenders import Contenders
from outrider.bench.peers.gguf_formats import in_format
from outrider.bench.peers.llama_cpp import LlamaCpp
from outrider.bench.peers.openvino import OpenVino
from outrider.bench.peers.ours import Outrider
from outrider.bench.peers.protocol import Limits, PeerSpec
from outrider.bench.peers.transformers import Transformers
from outrider.config import ProposerName
from outrider.errors import ConfigError

OURS = "outrider"
_PROPOSERS: tuple[ProposerName, ...] = ("none", "lookup", "dspark")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """``make`` may write the files that the peer reads, so it is called for those alone that run."""

    name: str
    kind: type[PeerSpec]
    make: Callable[[], PeerSpec]
    needs_gguf: bool = False

    @property
    def is_ours(self) -> bool:
        return self.kind is Outrider


def candidates(
    contenders: Contenders, model: Path, limits: Limits, *, formats: Sequence[str], lookup_tokens: Sequence[int]
) -> tuple[Candidate, ...]:
    """Every peer for the model at ``model``: a GGUF file or an HF directory. ``contenders``: ours."""
    return (
        *_ours(contenders, limits),
        *_of_gguf("llama.cpp", LlamaCpp, model, limits, formats, lookup_tokens),
        *_of_gguf("openvino", OpenVino, model, limits, formats, lookup_tokens),
        *_transformers(model, limits, lookup_tokens),
    )


def chosen(all_of_them: Iterable[Candidate], patterns: Sequence[str]) -> tuple[Candidate, ...]:
    """Those whose name matches one of ``patterns``, as a shell matches; ConfigError for one that matches none."""
    everyone = tuple(all_of_them)
    for pattern in patterns:
        if not any(fnmatchcase(each.name, pattern) for each in everyone):
            raise ConfigError(f"peers={pattern!r} is none of {', '.join(each.name for each in everyone)}")
    return tuple(each for each in everyone if any(fnmatchcase(each.name, pattern) for pattern in patterns))


def obstacle(candidate: Candidate, model: Path) -> str:
    """Why ``candidate`` cannot take part, as far as can be said without loading it; "" if it can."""
    if importlib.util.find_spec(candidate.kind.module) is None:
        return "not installed (it is in the extra named peers)"
    if candidate.needs_gguf and model.is_dir():
        return "reads GGUF files only, and the model is a directory"
    return ""


def versions(taking_part: Iterable[Candidate]) -> dict[str, str]:
    """By distribution; "unknown" for what can be imported and was not installed as one."""
    found = {}
    for name in dict.fromkeys(name for each in taking_part for name in each.kind.distributions):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def _ours(contenders: Contenders, limits: Limits) -> Iterator[Candidate]:
    for proposer in _PROPOSERS:
        if proposer in contenders.names:
            make = partial(Outrider, args=contenders.args, proposer=proposer, limits=limits)
            yield Candidate(name=f"{OURS}-{proposer}", kind=Outrider, make=make)


def _of_gguf(
    label: str,
    kind: type[LlamaCpp | OpenVino],
    model: Path,
    limits: Limits,
    formats: Sequence[str],
    lookup_tokens: Sequence[int],
) -> Iterator[Candidate]:
    def make(format_: str, tokens: int) -> PeerSpec:
        return kind(path=str(in_format(model, format_)), limits=limits, lookup_tokens=tokens)

    for format_ in formats:
        for tokens in (0, *lookup_tokens):
            name = f"{label}-{format_}{_suffix(tokens)}"
            yield Candidate(name=name, kind=kind, make=partial(make, format_, tokens), needs_gguf=True)


def _transformers(model: Path, limits: Limits, lookup_tokens: Sequence[int]) -> Iterator[Candidate]:
    for tokens in (0, *lookup_tokens):
        make = partial(Transformers, path=str(model), limits=limits, lookup_tokens=tokens)
        yield Candidate(name=f"transformers-bfloat16{_suffix(tokens)}", kind=Transformers, make=make)


def _suffix(lookup_tokens: int) -> str:
    return f"-lookup-{lookup_tokens}" if lookup_tokens else ""
