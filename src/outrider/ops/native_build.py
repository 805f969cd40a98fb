"""Compiling C++ where a compiler is at hand, once per machine.

Contract: ``build_library`` gives the loaded library, or None, with the reason in the log, where there is neither a
compiler nor an earlier build, or the build fails; every caller has a torch path that means the same. A build is kept in
the cache folder under a name made of everything that shaped it (sources, flags, processor, compiler), so that a stale
one is never loaded. A cache that cannot be written costs a build per process. Worst fault: code for another processor,
which ends in SIGILL; hence the processor's feature flags in the name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from outrider.config import cache_dir
from outrider.logger import get_logger

logger = get_logger(__name__)

_COMPILE_TIMEOUT_S = 300


def build_library(
    name: str, sources: Mapping[str, str], *, main: str, flags: Sequence[str], libraries: Sequence[str] = ()
) -> ctypes.CDLL | None:
    """``sources``: text by file name; ``main`` is the one to compile; ``libraries``: linker arguments, and all of them:
    what flags would bring along (``-fopenmp`` the compiler's own OpenMP) is not linked."""
    described = "\0".join((main, *flags, *libraries, _processor(), *(f"{k}\0{v}" for k, v in sources.items())))
    folder, stem = cache_dir() / "kernels", f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:20]}"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        builds = sorted(folder.glob(f"{stem}-*.so"))  # of compilers that were here once: any will do
        if not builds:
            logger.info("no C++ compiler (g++ or clang++): %s runs on torch, which is slower", name)
            return None
        return ctypes.CDLL(str(builds[-1]))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    kept = folder / f"{stem}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
    if kept.is_file():
        return ctypes.CDLL(str(kept))
    logger.info("compiling %s for this processor, once", name)
    with tempfile.TemporaryDirectory(prefix="outrider-build-") as scratch:
        for file_name, text in sources.items():
            (Path(scratch) / file_name).write_text(text, encoding="utf-8")
        compiled, built = Path(scratch) / "compiled.o", Path(scratch) / "built.so"
        for step in (
            [compiler, *flags, "-fPIC", "-c", str(Path(scratch) / main), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), *libraries, "-o", str(built)],
        ):
            if not _runs(step, name):
                return None
        return ctypes.CDLL(str(_keep(built, kept)))


def _runs(step: Sequence[str], name: str) -> bool:
    try:
        done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        logger.warning("compiling %s took over %d s: torch is used", name, _COMPILE_TIMEOUT_S)
        return False
    if done.returncode:
        logger.warning("compiling %s failed, torch is used: %s", name, done.stderr.strip()[:400])
    return done.returncode == 0


def _keep(built: Path, kept: Path) -> Path:
    """Into the cache in one move, since another process may be building the same; or where it is."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        staged = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(built, staged)
        staged.replace(kept)
    except OSError as error:
        logger.info("%s cannot be kept (%s): it is built again by the next process", kept.name, error)
        return built
    return kept


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
