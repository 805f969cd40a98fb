"""The front's end of a peer's process.

Each peer has a process of its own so that no thread pool meets another's, and its memory is its own. One works at a
time; the others wait for their connection. A process ends with its connection, so none outlives the front.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from multiprocessing import Pipe
from types import TracebackType

from outrider.bench.peers.protocol import Answer, CannotRunError, Failure, Loaded, PeerSpec, Refusal, Reply, Workload
from outrider.config import rank_environment

_LEAVE_S = 5.0


class PeerFailedError(Exception):
    """The peer did not load, raised, or its process ended; the text says why. It is not to be asked again."""


class PeerProcess:
    def __init__(self, spec: PeerSpec, *, threads: int) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "outrider.bench.peers.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the command's, whose last line may be JSON
                env={**rank_environment(num_threads=threads), "OMP_NUM_THREADS": str(threads)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # what is typed at the terminal is the front's
            )
        self._spec = spec

    def load(self) -> Loaded:
        """Once, before anything else. Raises PeerFailedError."""
        reply = self._ask(self._spec)
        assert isinstance(reply, Loaded), f"a peer answered its spec with {reply}"
        return reply

    def generate(self, workload: Workload) -> Answer:
        """Raises PeerFailedError, or CannotRunError for a mode that the peer does not have."""
        reply = self._ask(workload)
        if isinstance(reply, Refusal):
            raise CannotRunError(reply.reason)
        assert isinstance(reply, Answer), f"a peer answered a workload with {reply}"
        return reply

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if type_ is not None:
            self._process.kill()  # it may be in the middle of minutes of work
        self.close()

    def _ask(self, message: PeerSpec | Workload) -> Reply:
        try:
            self._connection.send(message)
            reply: Reply = self._connection.recv()
        except (EOFError, OSError):
            raise PeerFailedError(f"its process ended {self._exit_text()}") from None
        if isinstance(reply, Failure):
            raise PeerFailedError(reply.reason)
        return reply

    def _exit_text(self) -> str:
        try:
            code = self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return "its connection"
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
