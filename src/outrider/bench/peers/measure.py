"""The measurement: round by round, every peer works on the same prompts, one at a time, in an order that rotates.

A cell is a number of streams and a temperature. Within a round, all peers run a cell before any runs the next, so that
the machine's drift meets all of them; ratios are taken within rounds. Cells with fewer streams come first: a peer's
peak memory after a cell's first round is then that of no more streams than the cell has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from outrider.bench.comparison import ContenderFigures, Ratio, rotated
from outrider.bench.peers.process import PeerFailedError, PeerProcess
from outrider.bench.peers.protocol import Answer, CannotRunError, PeerSpec, Workload
from outrider.errors import OutriderError

_WARM_UP_TOKENS = 8
_SETTLE_S = 0.05  # worker threads of the peer that has just ended spin for a while


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    streams: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersLoad:
    """What is measured: every cell, ``repeat`` times."""

    prompts: Sequence[tuple[int, ...]]
    cells: Sequence[Cell]
    max_tokens: int
    seed: int
    repeat: int

    def workload(self, cell: Cell, repetition: int) -> Workload:
        """The prompts, taken in turn up to a multiple of the streams, so that none of them idles at the end.

        Repetitions have other seeds: sampled text decides how much lookup finds.
        """
        count = -(-len(self.prompts) // cell.streams) * cell.streams
        return Workload(
            prompts=tuple(self.prompts[i % len(self.prompts)] for i in range(count)),
            temperature=cell.temperature,
            streams=cell.streams,
            max_tokens=self.max_tokens,
            seed=self.seed + repetition * count,
        )

    def warm_up(self, cell: Cell) -> Workload:
        """A few tokens of each stream: first calls cost more than later ones."""
        return Workload(
            prompts=self.workload(cell, 0).prompts[: cell.streams],
            temperature=cell.temperature,
            streams=cell.streams,
            max_tokens=min(_WARM_UP_TOKENS, self.max_tokens),
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigures:
    figures: ContenderFigures
    prefill_tokens_per_s: float | None  # prompt tokens / time to the first token; None with several streams
    over_best_peer: Ratio | None  # None: no peer of another kind ran this
    peak_rss_bytes: int  # of its process, up to the end of the cell's first round
    first_answer: tuple[int, ...]  # token ids, for a look at whether it makes sense


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReport:
    cell: Cell
    best_peer: str  # of those that are not ours, by median output tokens/s; "": none
    peers: Mapping[str, PeerFigures]
    skipped: Mapping[str, str]  # reasons, of peers that had been loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersReport:
    cells: tuple[CellReport, ...]
    load_s: Mapping[str, float]
    skipped: Mapping[str, str]  # reasons, of peers that could not be loaded


def measure_peers(
    specs: Mapping[str, PeerSpec],
    load: PeersLoad,
    *,
    threads: int,
    is_ours: Callable[[str], bool],
    on_turn: Callable[[], object] = lambda: None,
) -> PeersReport:
    """``on_turn`` is called ``len(specs) * len(load.cells) * load.repeat`` times.

    A peer that fails is skipped, with the reason. Raises OutriderError if none can be loaded.
    """
    with ExitStack() as stack:
        rounds = _Rounds(load)
        for name, spec in specs.items():
            rounds.add(name, stack.enter_context(PeerProcess(spec, threads=threads)))
        if not rounds.load_s:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rounds.not_loaded.items())
            raise OutriderError(f"no peer can be loaded: {reasons}")
        for repetition in range(load.repeat):
            for number, cell in enumerate(load.cells):
                for name in rotated(list(specs), repetition + number):
                    rounds.turn(name, cell, repetition)
                    on_turn()
    return PeersReport(
        cells=tuple(rounds.report(cell, is_ours=is_ours) for cell in load.cells),
        load_s=rounds.load_s,
        skipped=rounds.not_loaded,
    )


class _Rounds:
    """What has been measured so far, and which peers are left."""

    def __init__(self, load: PeersLoad) -> None:
        self.load_s: dict[str, float] = {}
        self.not_loaded: dict[str, str] = {}
        self._load = load
        self._processes: dict[str, PeerProcess] = {}
        self._failed: dict[str, str] = {}
        self._refused: dict[Cell, dict[str, str]] = {cell: {} for cell in load.cells}
        self._answers: dict[Cell, dict[str, list[Answer]]] = {cell: {} for cell in load.cells}

    def add(self, name: str, process: PeerProcess) -> None:
        try:
            self.load_s[name] = process.load().load_s
            self._processes[name] = process
        except PeerFailedError as failure:
            self.not_loaded[name] = f"did not load: {failure}"

    def turn(self, name: str, cell: Cell, repetition: int) -> None:
        if name not in self._processes or name in self._failed or name in self._refused[cell]:
            return
        process = self._processes[name]
        try:
            if repetition == 0:
                process.generate(self._load.warm_up(cell))
            time.sleep(_SETTLE_S)
            answer = process.generate(self._load.workload(cell, repetition))
        except CannotRunError as refusal:
            self._refused[cell][name] = str(refusal)
        except PeerFailedError as failure:
            self._failed[name] = f"failed: {failure}"
        else:
            self._answers[cell].setdefault(name, []).append(answer)

    def report(self, cell: Cell, *, is_ours: Callable[[str], bool]) -> CellReport:
        """Of the peers that ran the cell in every round."""
        answers = {name: each for name, each in self._answers[cell].items() if len(each) == self._load.repeat}
        runs = {name: [answer.run for answer in each] for name, each in answers.items()}
        figures = {name: ContenderFigures.of(each) for name, each in runs.items()}
        foreign = [name for name in figures if not is_ours(name)]
        best = max(foreign, key=lambda name: figures[name].output_tokens_per_s.median, default="")
        return CellReport(
            cell=cell,
            best_peer=best,
            peers={
                name: PeerFigures(
                    figures=figures[name],
                    prefill_tokens_per_s=self._prefill_tokens_per_s(cell, figures[name]),
                    over_best_peer=Ratio.of(runs[name], runs[best]) if best else None,
                    peak_rss_bytes=answers[name][0].peak_rss_bytes,
                    first_answer=runs[name][0].served[0].token_ids,
                )
                for name in self._processes
                if name in figures
            },
            skipped={
                name: self._refused[cell].get(name) or self._failed[name]
                for name in self._processes
                if name not in figures
            },
        )

    def _prefill_tokens_per_s(self, cell: Cell, figures: ContenderFigures) -> float | None:
        """With one stream nothing else goes on before a request's first token."""
        if cell.streams > 1:
            return None
        prompts = self._load.workload(cell, 0).prompts
        return sum(map(len, prompts)) / len(prompts) / figures.ttft_s.mean
