"""The folder that packed weights are kept in: which file is whose, and which of them go.

A file is named after its checkpoint, its variant and a digest of the paths it came from, so a checkpoint that changes
replaces its own. Whoever adds one also takes away what nobody will read again (files of checkpoints that are gone or
have changed, of other versions of the code that packs, and what a killed process left half written), and then those
unused for longest until the folder holds at most ``MOST_BYTES``. What a process has mapped stays, and what was just
added.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from outrider.config import cache_dir
from outrider.logger import get_logger
from outrider.models.packed_weights import Origin, PackedWeights
from outrider.ops import native_kernels

logger = get_logger(__name__)

MOST_BYTES = 8 * 2**30
_HALF_WRITTEN_S = 3600  # a file without its last name is being written for so long at most
_CODE = ("ops", "ops/native", "layers", "models")  # that weights come through, below the package
_DIRECTORY_SUFFIXES = (".safetensors", ".json")  # what of a checkpoint directory shapes a model


def cached_weights(*sources: Path, variant: str, make: Callable[[], PackedWeights]) -> PackedWeights:
    """The packed weights of a checkpoint: mapped from the cache, or made, and kept there for the next start.

    ``sources``: the checkpoint, and others that went into it. ``variant``: what makes different weights of the same
    checkpoints; each has a file of its own.
    """
    origin = origin_of(*sources, variant=variant)
    named = "\0".join((variant, *origin.sources))
    place = hashlib.sha256(named.encode()).hexdigest()[:12]
    path = packed_directory() / f"{sources[0].stem}-{variant}-{place}.safetensors"
    weights = PackedWeights.load(path, key=origin.key)
    if weights is not None:
        with suppress(OSError):
            os.utime(path)  # when it was last used
        return weights
    weights = make()
    try:
        weights.save(path, origin=origin)
        prune(path.parent, added=path)
    except OSError as error:
        logger.info("%s cannot be kept (%s): weights are packed again by the next process", path.name, error)
    return weights


def packed_directory() -> Path:
    return cache_dir() / "packed"


def origin_of(*sources: Path, variant: str) -> Origin:
    """Its key is of everything that shapes packed weights: files by path, size and time of change, and the code."""
    described = [variant, _code_digest()]
    for source in sources:
        inside = sorted(source.iterdir()) if source.is_dir() else ()
        for path in [path for path in inside if path.suffix in _DIRECTORY_SUFFIXES] or [source]:
            status = path.stat()
            described += [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    key = hashlib.sha256("\0".join(described).encode()).hexdigest()
    return Origin(sources=tuple(str(source.resolve()) for source in sources), variant=variant, key=key)


def prune(directory: Path, *, added: Path, most_bytes: int = MOST_BYTES) -> None:
    """Take away what nobody will read again, then what was not used for longest, down to ``most_bytes``."""
    kept: list[tuple[float, int, Path]] = []
    for path in directory.iterdir():
        with suppress(FileNotFoundError):  # another process prunes as well
            status = path.stat()
            if path == added or not _is_stale(path, age_s=time.time() - status.st_mtime):
                kept.append((status.st_mtime, status.st_size, path))
            elif _delete_unless_in_use(path):
                logger.info("%s is gone from the cache: nothing will read it again", path.name)
            else:
                kept.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= most_bytes:
            return
        if path != added and _delete_unless_in_use(path):
            logger.info("%s is gone from the cache, which may hold %d MiB", path.name, most_bytes // 2**20)
            total -= size


def _is_stale(path: Path, *, age_s: float) -> bool:
    if path.suffix != ".safetensors":
        return age_s > _HALF_WRITTEN_S
    try:
        origin = Origin.read(path)
        return origin != origin_of(*map(Path, origin.sources), variant=origin.variant)
    except (ValueError, OSError):  # another layout, or a checkpoint that is gone
        return True


def _delete_unless_in_use(path: Path) -> bool:
    """Whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@cache
def _code_digest() -> str:
    """Packed bits follow from code alone, so no version is kept by hand that a change could forget."""
    package = Path(native_kernels.__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (package / folder).iterdir() if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()
