"""One rank as a process: connect to the front, build, run the loop, and never outlive the front.

Started by ``engine.launch`` with one JSON line on its standard input (``RankOrder``); that pipe stays open as long as
whoever started it lives. A thread takes the front's commands, so that a rank busy with a step still notices at once
when the front is gone. Signals that end a terminal's or a service's processes are the front's to handle: it drains and
then tells the ranks. Exit status: 0 when told to leave, else 1.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from typing import Any, NoReturn

import torch

from outrider.config import EngineArgs
from outrider.engine.devices import device_of_rank, resolve_device
from outrider.engine.messages import Died, Hello, Outputs, Ready, Start
from outrider.engine.rank_loop import Inbox, RankLoop
from outrider.engine.setup import topology_of
from outrider.errors import CollectiveError
from outrider.logger import get_logger, mark_rank
from outrider.parallel.torch_communicator import close_parallel, init_parallel

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """What a rank needs to know before it can be told the rest."""

    rank: int
    host: str  # of the front
    port: int
    key: str  # hex; both sides prove that they know it
    args: EngineArgs | None  # of the command line, on machines and in processes other than the front's

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankOrder:
        fields: dict[str, Any] = json.loads(text)
        args = fields.pop("args")
        return cls(**fields, args=EngineArgs(**args) if args is not None else None)


def main() -> NoReturn:
    order = RankOrder.from_json(sys.stdin.readline())
    threading.Thread(target=_exit_with_starter, daemon=True).start()
    status = run_rank(order)
    sys.stderr.flush()
    os._exit(status)  # an interpreter that ends in good order would wait for the thread that reads standard input


def run_rank(order: RankOrder) -> int:
    """Be the rank until the end; the exit status. Errors on the way end the process at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    mark_rank(order.rank)
    try:
        connection = Client((order.host, order.port), authkey=bytes.fromhex(order.key))
        connection.send(Hello(rank=order.rank, args=order.args))
    except (EOFError, ConnectionError):  # the front has ended meanwhile
        return 1
    try:
        start: Start = connection.recv()
        inbox = Inbox()
        threading.Thread(target=_listen, args=(connection, inbox), daemon=True).start()
        _serve(order.rank, start, connection, inbox)
    except (EOFError, ConnectionResetError):  # the front is gone
        return 1
    except Exception as error:
        _tell_death(connection, error)
        os._exit(1)  # no clean-up: it could wait for ranks that do not come
    close_parallel()
    return 0


def _serve(rank: int, start: Start, connection: Connection, inbox: Inbox) -> None:
    topology = topology_of(start.args)
    device = device_of_rank(start.args, resolve_device(start.args), rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL, which takes the current one
    parallel = init_parallel(
        topology,
        rank,
        backend="gloo" if device.type == "cpu" else "nccl",
        init_method=f"tcp://{start.store_host}:{start.store_port}",
        timeout=timedelta(seconds=start.args.collective_timeout_seconds),
    )
    core = start.build(start.args, parallel=parallel)

    def tell(outputs: Outputs) -> None:
        connection.send(outputs if topology.is_leader(rank) else dataclasses.replace(outputs, snapshots=()))

    connection.send(Ready())
    inbox.sleep_until_wakes_exceed(0)  # the others may be building still
    RankLoop(core, inbox, attn_tp=parallel.attn_tp, tell=tell).run()


def _listen(connection: Connection, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # the front is gone, or has given up on this rank


def _exit_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


def _tell_death(connection: Connection, error: Exception) -> None:
    message = Died(
        error_type=type(error).__name__,
        message=str(error),
        traceback=traceback.format_exc(),
        is_collective=isinstance(error, CollectiveError),
    )
    try:
        connection.send(message)
    except OSError:
        logger.exception("the rank has failed, and the front is gone")


if __name__ == "__main__":
    main()
