"""Real ranks for tests: spawned processes that meet over gloo, run one function, and are always reaped.

Contract: ``run_ranks`` returns every rank's result, or raises ``RankFailure`` with the first rank's traceback; a rank
that dies without a word or hangs is named. No process outlives the call.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology
from outrider.parallel.torch_communicator import close_parallel, init_parallel

_COLLECTIVE_TIMEOUT = timedelta(seconds=30)


class RankFailure(AssertionError):  # noqa: N818 - what failed is a rank
    """A rank raised, died or hung."""


def run_ranks(
    topology: Topology,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    collective_timeout: timedelta = _COLLECTIVE_TIMEOUT,
) -> list[Any]:
    """``fn(parallel, *args)`` on every rank; ``fn`` is a module's top-level function, results and args are pickled."""
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="outrider-ranks-") as folder:
        try:
            for rank in range(topology.world_size):
                receiver, sender = context.Pipe(duplex=False)
                place = f"file://{Path(folder) / 'store'}"
                process = context.Process(
                    target=_rank_main, args=(sender, topology, rank, place, collective_timeout, fn, args), daemon=True
                )
                process.start()
                sender.close()  # so that a rank that dies is an end of file here
                processes.append(process)
                pipes.append(receiver)
            return _collect(pipes, processes, deadline=time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], processes: list[SpawnProcess], *, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(open_pipes), timeout=max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise RankFailure(f"no answer in time from ranks {sorted(open_pipes.values())}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                outcome, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5.0)
                raise RankFailure(f"rank {rank} ended with exit code {processes[rank].exitcode} and no word") from None
            if outcome == "error":
                raise RankFailure(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    sender: Connection,
    topology: Topology,
    rank: int,
    place: str,
    collective_timeout: timedelta,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        parallel: ParallelState = init_parallel(
            topology, rank, backend="gloo", init_method=place, timeout=collective_timeout
        )
        message = pickle.dumps(("result", fn(parallel, *args)))
    except BaseException:
        message = pickle.dumps(("error", traceback.format_exc()))
    sender.send_bytes(message)
    close_parallel()
