"""From ``--draft`` to a checkpoint directory: the drafter bundled for the model, or one of the user's.

A user's checkpoint is a local directory or a hub id. A drafter bundled with the package lives in
``outrider/drafters/<model name>/`` and is found by the model's name.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from outrider.errors import CheckpointError

_HUB_PATTERNS = ["*.json", "*.safetensors"]


def resolve_drafter(draft: str, model_name: str) -> Path | None:
    """The directory that ``draft`` (auto, none, lookup, a directory or a hub id) means; None if it means no drafter.

    ``auto`` means none for a model without a bundled drafter; ``lookup`` proposes without one.
    """
    if draft in ("none", "lookup"):
        return None
    if draft == "auto":
        return bundled_drafter(model_name)
    path = Path(draft).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(
            f"draft={draft!r} is a file; a drafter is a directory with config.json and model.safetensors"
        )
    return _download(draft)


def bundled_drafter(model_name: str) -> Path | None:
    """The directory of the drafter shipped for ``model_name``."""
    if not model_name or Path(model_name).name != model_name:
        return None  # a path or hub id, which is never bundled
    path = Path(str(files("outrider"))) / "drafters" / model_name
    return path if (path / "config.json").is_file() else None


def _download(repository: str) -> Path:
    from huggingface_hub import snapshot_download  # a slow import that local drafters do without

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # invalid id, absent repository, no network: one of many types of two libraries
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"draft={repository!r} not found. Tried: the words auto, none, lookup; a local directory (none of that "
            f"name); a Hugging Face hub id ({reason})"
        ) from error
