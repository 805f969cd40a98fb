"""Imports go downward only. The table is the architecture's; a module that is not in it fails here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import outrider

ROOT = Path(outrider.__file__).parent
LAYERS: tuple[tuple[str, ...], ...] = (  # lowest first
    ("config", "sampling_params", "errors", "logger", "outputs"),
    ("batch", "parallel", "ops"),
    ("layers",),
    ("models",),
    ("scheduler", "kv_cache", "runner", "spec_decode", "sampling"),
    ("engine",),
    ("cli", "server", "train", "bench"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
WITHOUT_TORCH = ("scheduler", "kv_cache", "config", "sampling_params", "errors", "outputs", "logger")
TOP = len(LAYERS)  # the package's own __init__ and __main__ may import anything


def modules() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def unit(path: Path) -> str:
    """The package or top-level module a file belongs to; "" for the package itself."""
    return path.parts[0] if len(path.parts) > 1 else "" if path.stem.startswith("__") else path.stem


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and absolute name of everything a file imports, wherever in it: in functions and for type checkers too."""
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ("outrider", *path.parts[:-1])
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            # ``from outrider import x`` may mean the module x as well as a name in the package
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_go_downward(path: Path) -> None:
    own = unit(path)
    assert own == "" or own in LEVEL, f"{own} is in no layer: add it to the table and to the architecture"
    level = LEVEL[own] if own else TOP
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "outrider":
            assert parts[0] != "torch" or own not in WITHOUT_TORCH, f"{path}:{line}: {own} must not import torch"
            continue
        other = parts[1] if len(parts) > 1 else ""
        if other in LEVEL:
            assert LEVEL[other] <= level, f"{path}:{line}: {own} (layer {level}) imports {name} (layer {LEVEL[other]})"
        else:
            assert level >= LEVEL["cli"], f"{path}:{line}: {own} imports {name} from the package itself"


def test_lower_packages_do_not_import_one_another_in_circles() -> None:
    """Within one layer the packages' imports form no circle."""
    edges: dict[str, set[str]] = {package: set() for package in LEVEL}
    for path in modules():
        for _, name in imported(path):
            parts = name.split(".")
            if parts[0] == "outrider" and len(parts) > 1 and parts[1] in LEVEL and unit(path) in LEVEL:
                edges[unit(path)].add(parts[1])
    done: set[str] = set()

    def visit(package: str, above: tuple[str, ...]) -> None:
        assert package not in above, f"circle of imports: {' -> '.join((*above, package))}"
        if package not in done:
            for other in sorted(edges[package] - {package}):
                visit(other, (*above, package))
            done.add(package)

    for package in LEVEL:
        visit(package, ())


def test_the_walk_sees_every_kind_of_import() -> None:
    """The guard above is only as good as this: an import under TYPE_CHECKING and one in a function are found."""
    names = {name for _, name in imported(Path("scheduler/request.py"))}
    assert "outrider.sampling_params.SamplingParams" in names  # under TYPE_CHECKING
    names = {name for _, name in imported(Path("models/drafter_checkpoint_config.py"))}
    assert "transformers.AutoConfig" in names  # within a function
