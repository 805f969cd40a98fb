"""``python -m outrider.bench.peers.worker FD``: the process of one peer, at the other end of the connection ``FD``.

It receives a spec, loads it, and answers workloads until the connection closes. Imports as little as it can.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from multiprocessing.connection import Connection

from outrider.bench.machine import peak_rss_bytes
from outrider.bench.peers.protocol import (
    Answer,
    CannotRunError,
    Failure,
    Loaded,
    Peer,
    PeerSpec,
    Refusal,
    Reply,
    Workload,
)


def serve(connection: Connection) -> None:
    spec: PeerSpec = connection.recv()
    began = time.perf_counter()
    try:
        peer = spec.load()
    except Exception as error:  # of somebody else's engine: anything
        connection.send(_failure(error))
        return
    connection.send(Loaded(load_s=time.perf_counter() - began))
    while True:
        connection.send(_reply(peer, connection.recv()))


def _reply(peer: Peer, workload: Workload) -> Reply:
    try:
        return Answer(run=peer.generate(workload), peak_rss_bytes=peak_rss_bytes())
    except CannotRunError as refusal:
        return Refusal(reason=str(refusal))
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Failure:
    traceback.print_exc()
    lines = str(error).strip().splitlines()
    return Failure(reason=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


if __name__ == "__main__":
    # The other side has what it wanted, or is gone.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])))
