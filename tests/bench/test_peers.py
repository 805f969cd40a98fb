"""Peers in real processes: turns, reasons for skipping, figures; and the files and names that go to them."""

from __future__ import annotations

import ast
import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake_peer import FakePeer

from outrider.bench.peers.catalog import Candidate, chosen, obstacle, versions
from outrider.bench.peers.measure import Cell, PeersLoad, PeersReport, measure_peers
from outrider.bench.peers.ours import Outrider
from outrider.bench.peers.protocol import PeerSpec
from outrider.errors import ConfigError, OutriderError

ONE, TWO = Cell(streams=1, temperature=0.0), Cell(streams=2, temperature=0.8)
PROMPTS = [(5, 6), (7, 8, 9), (1,)]


def _measure(repeat: int, *specs: FakePeer) -> PeersReport:
    load = PeersLoad(prompts=PROMPTS, cells=[ONE, TWO], max_tokens=20, seed=3, repeat=repeat)
    turns: list[None] = []
    report = measure_peers(
        {spec.name: spec for spec in specs},
        load,
        threads=1,
        is_ours=lambda name: name == "ours",
        on_turn=lambda: turns.append(None),
    )
    assert len(turns) == len(specs) * 2 * repeat
    return report


def _journal(path: Path) -> list[tuple[Any, ...]]:
    return [ast.literal_eval(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_turns_rotate_one_at_a_time_on_equal_prompts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    report = _measure(2, *(FakePeer(name=name, journal=str(path)) for name in ("a", "ours")))
    entries = _journal(path)
    real = [entry for entry in entries if entry[6] == 20]
    assert [(e[0], e[4]) for e in real] == [
        ("a", 1), ("ours", 1), ("ours", 2), ("a", 2),
        ("ours", 1), ("a", 1), ("a", 2), ("ours", 2),
    ]  # fmt: skip
    assert len(entries) == len(real) + 4  # one warm-up a peer and cell
    assert all(before[3] <= after[2] for before, after in pairwise(entries))
    assert {e[0]: len({f[1] for f in entries if f[0] == e[0]}) for e in entries} == {"a": 1, "ours": 1}
    assert len({e[1] for e in entries}) == 2
    assert {e[8] for e in entries} == {"1"}
    assert {e[9] for e in real if e[4] == 1} == {tuple(PROMPTS)}
    assert {e[9] for e in real if e[4] == 2} == {(*PROMPTS, PROMPTS[0])}  # up to a multiple of the streams
    assert {(e[4], e[7]) for e in real} == {(1, 3), (1, 6), (2, 3), (2, 7)}  # other seeds in the second round
    assert [list(cell.peers) for cell in report.cells] == [["a", "ours"]] * 2


def test_figures_and_ratios_to_the_best_peer(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    report = _measure(
        2,
        FakePeer(name="slow", journal=path, seconds_per_token=0.04),
        FakePeer(name="quick", journal=path, seconds_per_token=0.02),
        FakePeer(name="ours", journal=path, seconds_per_token=0.01),
    )
    one, two = report.cells
    assert (one.best_peer, two.best_peer) == ("quick", "quick")  # ours is faster, and no peer of ours
    ours = one.peers["ours"]
    assert dataclasses.astuple(ours.figures.output_tokens_per_s) == pytest.approx((100.0, 100.0, 100.0))
    assert two.peers["ours"].figures.output_tokens_per_s.median == pytest.approx(200.0)
    assert ours.over_best_peer is not None
    assert ours.over_best_peer.output_tokens_per_s.median == pytest.approx(2.0)
    slow = one.peers["slow"].over_best_peer
    assert slow is not None
    assert slow.output_tokens_per_s.max == pytest.approx(0.5)
    assert ours.prefill_tokens_per_s == pytest.approx(2 / 0.02)  # 2 tokens a prompt, a tenth of 0.2 s
    assert two.peers["ours"].prefill_tokens_per_s is None
    assert ours.first_answer == (6,) * 20
    assert ours.peak_rss_bytes > 5 * 2**20
    assert set(report.load_s) == {"slow", "quick", "ours"}


def test_who_cannot_run_is_skipped_with_the_reason(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    report = _measure(
        1,
        FakePeer(name="absent", journal=path, load_error="no such file"),
        FakePeer(name="single", journal=path, max_streams=1),
        FakePeer(name="mortal", journal=path, dies_at_temperature=0.8),
        FakePeer(name="ours", journal=path),
    )
    assert report.skipped == {"absent": "did not load: OSError: no such file"}
    one, two = report.cells
    assert list(one.peers) == ["single", "mortal", "ours"]
    assert list(two.peers) == ["ours"]
    assert two.skipped == {"single": "serves 1 streams", "mortal": "failed: its process ended with exit code 3"}
    assert two.best_peer == ""
    assert two.peers["ours"].over_best_peer is None


def test_nothing_to_measure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="no peer can be loaded: a: did not load: OSError: gone"):
        _measure(1, FakePeer(name="a", journal=str(tmp_path / "j"), load_error="gone"))


def test_a_child_does_not_inherit_the_memory_figure_of_its_parent(tmp_path: Path) -> None:
    block = bytearray(300 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    report = _measure(1, FakePeer(name="ours", journal=str(tmp_path / "journal")))
    assert report.cells[0].peers["ours"].peak_rss_bytes < 200 * 2**20
    del block


class MissingPeer(FakePeer):
    module = "a_module_that_nobody_has"


def test_names_and_obstacles(tmp_path: Path) -> None:
    spec: PeerSpec = FakePeer(name="x", journal="")
    everyone = [
        Candidate(name="outrider-none", kind=Outrider, make=lambda: spec),
        Candidate(name="llama.cpp-q4_0", kind=MissingPeer, make=lambda: spec, needs_gguf=True),
        Candidate(name="llama.cpp-q8_0", kind=FakePeer, make=lambda: spec, needs_gguf=True),
    ]
    assert [each.name for each in chosen(everyone, ["*-q8_0", "outrider-*"])] == ["outrider-none", "llama.cpp-q8_0"]
    with pytest.raises(ConfigError, match=r"peers='vllm' is none of outrider-none, llama\.cpp-q4_0"):
        chosen(everyone, ["vllm", "*"])
    assert [obstacle(each, tmp_path) for each in everyone] == [
        "",
        "not installed (it is in the extra named peers)",
        "reads GGUF files only, and the model is a directory",
    ]
    assert [each.is_ours for each in everyone] == [True, False, False]
    assert obstacle(everyone[2], tmp_path / "model.gguf") == ""
    assert versions(everyone[1:]) == {"pytest": pytest.__version__, "no-such-distribution": "unknown"}
