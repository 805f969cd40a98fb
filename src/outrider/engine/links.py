"""The front's end of every rank: its connection, its process where it is ours, what it said last, and its end.

Contract: ``send`` never blocks (a rank that is stopped must not stop the front), and a rank is always listened to (a
front that is busy must not stop a rank), so each has a thread for either direction. Of what ranks report, the newest
snapshot of each request is kept and no older one. ``end`` leaves no process of ours behind, however it comes.

A failure is looked at for a moment before it is named: the rank that complains first is often only the one that waited
for the rank that failed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from outrider.engine.deltas import SnapshotDecoder
from outrider.engine.messages import Command, Died, Outputs, Ready, Report, Shutdown, Start, Wake
from outrider.logger import get_logger
from outrider.outputs import EngineStats, RequestOutput

logger = get_logger(__name__)

GRACE_S = 1.0  # between the first sign of a failure and the verdict
LEAVE_S = 5.0  # that ranks may take to leave when told to
_POLL_S = 0.02


@dataclass(slots=True, eq=False)
class _Rank:
    """What the front knows of one rank; guarded by the links' condition."""

    rank: int
    process: subprocess.Popen[bytes] | None = None  # None: another machine's, or a launcher's
    connection: Connection | None = None
    outgoing: queue.SimpleQueue[Command | Start | None] = field(default_factory=queue.SimpleQueue)
    decoder: SnapshotDecoder = field(default_factory=SnapshotDecoder)
    ready: bool = False
    died: Died | None = None
    lost: bool = False  # its connection is closed
    stats: EngineStats | None = None

    @property
    def ended(self) -> bool:
        return self.lost or self.died is not None

    @property
    def exit_text(self) -> str:
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return "its connection closed"
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class RankLinks:
    def __init__(self, world_size: int, *, store: object) -> None:
        """``store``: where the ranks meet; it is to live as long as they."""
        self._store = store
        self._ranks = [_Rank(rank=rank) for rank in range(world_size)]
        self._changed = threading.Condition()
        self._snapshots: dict[str, RequestOutput] = {}
        self._interrupted = False
        self._heard_at = time.monotonic()
        self._ended = False

    # ---- beginning

    def add_process(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ranks[rank].process = process

    def attach(self, rank: int, connection: Connection) -> None:
        """``rank`` has said hello over ``connection``."""
        own = self._ranks[rank]
        assert own.connection is None, f"rank {rank} came twice"
        own.connection = connection
        for target, name in ((self._read, "read"), (self._write, "write")):
            threading.Thread(target=target, args=(own, connection), name=f"rank-{rank}-{name}", daemon=True).start()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not said hello."""
        return [rank for rank, own in enumerate(self._ranks) if own.connection is None]

    @property
    def gone_before_hello(self) -> str:
        """Of our processes that ended before they connected, what there is to say; "" if none has."""
        for rank in self.missing:
            process = self._ranks[rank].process
            if process is not None and process.poll() is not None:
                return f"rank {rank} ended {self._ranks[rank].exit_text} before it had started"
        return ""

    def wait_until_ready(self) -> None:
        """Until every rank has built its engine, or one has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failed or all(own.ready for own in self._ranks))

    # ---- running

    def send(self, rank: int, message: Command | Start) -> None:
        self._ranks[rank].outgoing.put(message)

    def send_all(self, message: Command | Start) -> None:
        for own in self._ranks:
            own.outgoing.put(message)

    def wait(self, *, timeout_s: float) -> None:
        """Until a rank has told something new, ``interrupt`` was called, a rank failed, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._snapshots or self._interrupted or self.failed, timeout_s)
            self._interrupted = False

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def take_snapshots(self) -> list[RequestOutput]:
        """What is new since the last call, the newest of each request."""
        with self._changed:
            taken, self._snapshots = self._snapshots, {}
            return list(taken.values())

    def stats(self, rank: int) -> EngineStats | None:
        """The latest that ``rank`` told."""
        with self._changed:
            return self._ranks[rank].stats

    @property
    def silent_s(self) -> float:
        """Seconds since any rank was heard."""
        return time.monotonic() - self._heard_at

    # ---- failure

    @property
    def failed(self) -> bool:
        return any(own.ended for own in self._ranks)

    @property
    def startup_error(self) -> Died | None:
        """What a rank said that failed by itself."""
        return next((own.died for own in self._ranks if own.died is not None and not own.died.is_collective), None)

    def diagnose(self) -> str:
        """Who is at fault, as far as can be told after a moment's wait; for the error every request gets."""
        deadline = time.monotonic() + GRACE_S
        while True:
            with self._changed:
                verdict = self._culprit()
                if verdict or not self._changed.wait_for(self._culprit, deadline - time.monotonic()):
                    return verdict or self._waited_in_vain()

    def _culprit(self) -> str:
        for rank, own in enumerate(self._ranks):
            if own.died is not None and not own.died.is_collective:
                return f"rank {rank} ended by {own.died.error_type}: {own.died.message}"
        for rank, own in enumerate(self._ranks):
            if own.lost and own.died is None:
                if own.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        own.process.wait(0.2)  # the connection closes a moment before
                return f"rank {rank} ended {own.exit_text}"
        return ""

    def _waited_in_vain(self) -> str:
        told = {rank: own.died for rank, own in enumerate(self._ranks) if own.died is not None}
        silent = [rank for rank in range(len(self._ranks)) if rank not in told]
        message = next((died.message for died in told.values()), "")
        if not silent or not told:
            return message or "no rank answers"
        names = f"rank {silent[0]} does" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} do"
        return f"{names} not answer ({message})"

    # ---- the end

    def end(self, *, orderly: bool) -> None:
        """Every rank's end: told to leave where ``orderly`` and possible, then by closing, then by killing ours."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            orderly = orderly and not self.failed
        if orderly:
            self.send_all(Shutdown())
            self.send_all(Wake())
            self._wait_for_ends(LEAVE_S)
        for own in self._ranks:
            own.outgoing.put(None)
            if own.connection is not None and not own.lost:
                _shut(own.connection)
        if not orderly:
            self._wait_for_ends(GRACE_S)
        for process in self._processes():
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks started here."""
        return [process.pid for process in self._processes()]

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [own.process for own in self._ranks if own.process is not None]

    def _wait_for_ends(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            connected = any(own.connection is not None and not own.lost for own in self._ranks)
            if not connected and all(process.poll() is not None for process in self._processes()):
                return
            time.sleep(_POLL_S)

    # ---- the threads

    def _read(self, own: _Rank, connection: Connection) -> None:
        try:
            while True:
                self._note(own, connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # what cannot be understood cannot be answered either
            logger.exception("a rank's report cannot be read")
        with self._changed:
            own.lost = True
            own.outgoing.put(None)
            self._changed.notify_all()

    def _note(self, own: _Rank, report: Report) -> None:
        with self._changed:
            match report:
                case Outputs():
                    own.stats = report.stats
                    for delta in report.snapshots:
                        self._snapshots[delta.request_id] = own.decoder.decode(delta)
                case Ready():
                    own.ready = True
                case Died():
                    own.died = report
                    if not self._ended:
                        logger.error("rank %d:\n%s", own.rank, report.traceback)
            self._heard_at = time.monotonic()
            self._changed.notify_all()

    def _write(self, own: _Rank, connection: Connection) -> None:
        try:
            while (message := own.outgoing.get()) is not None:
                connection.send(message)
        except OSError:
            pass  # the reader learns of it too


def _shut(connection: Connection) -> None:
    """Close for both sides at once, which a reader blocked in ``recv`` notices; ``close`` alone it would not."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as handle:
        handle.shutdown(socket.SHUT_RDWR)
