"""Starting ranks: on one machine, on several that run the same command, or by a launcher such as torchrun.

The process that takes requests is the front. It lives where rank 0 does, holds no weights, hosts the rendezvous store
(unless the launcher does) and is the only one that decides: what it resolves (memory, context limit) holds for all
ranks. Every rank connects to it. On other machines the command starts its share of the ranks and waits for them; in a
launcher's other processes it becomes the rank. Flags that differ between machines are refused.

Ranks are new interpreters and not forks, so that no thread or lock of the front's is copied, and a program that makes
an ``LLM`` needs no guard around its main part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though torch does not list it

from outrider.config import EngineArgs, Launcher, launcher_from_environment, rank_environment
from outrider.engine.engine import Engine
from outrider.engine.group import EngineGroup
from outrider.engine.links import RankLinks
from outrider.engine.messages import BuildEngine, Hello, Start, Wake
from outrider.engine.setup import ResolvedEngine, build_engine, resolve, topology_of
from outrider.engine.worker import RankOrder, run_rank
from outrider.errors import CheckpointError, ConfigError, EngineDeadError
from outrider.logger import get_logger
from outrider.parallel.state import ParallelState

logger = get_logger(__name__)

LOCALHOST = "127.0.0.1"
DEFAULT_MASTER_PORT = 29501
UNLIMITED_WAITING = 2**31  # of a rank: the front keeps the queue's limit
_FRONT_KEY = "outrider/front"
_ARRIVAL_S = 300  # from a rank's start to its hello: the imports of a busy machine, and the start of other machines
_ACCEPT_S = 0.2
_HANDSHAKE_S = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting:
    """Where ranks meet, who is the front, and which ranks this process starts."""

    store_host: str
    store_port: int  # 0: any
    hosts_store: bool
    is_front: bool
    everyone_is_local: bool
    ranks: tuple[int, ...]
    becomes: int | None  # the rank this very process is to be


_ALONE = _Meeting(
    store_host=LOCALHOST,
    store_port=0,
    hosts_store=True,
    is_front=True,
    everyone_is_local=True,
    ranks=(0,),
    becomes=None,
)


def make_engine(args: EngineArgs, *, build: BuildEngine = build_engine, own_process: bool = False) -> Engine:
    """The engine that ``args`` describe: of this process, or the front of several ranks.

    ``own_process`` puts a single rank into a process too, so that nothing the caller does (HTTP, tokenisation, text)
    takes the interpreter from its steps. ``build`` makes a rank's engine core. In processes without the front this
    does not return: see ``join_group``.
    """
    if args.world_size == 1:
        if own_process:
            return _launch(args, _ALONE, build)
        refuse_timeout(args)
        return build(args, parallel=ParallelState.single(topology_of(args)))
    join_group(args)
    return _launch(args, _meeting(args), build)


def refuse_timeout(args: EngineArgs) -> None:
    """Of an engine of one rank in this process: nobody waits there. Raises ConfigError."""
    if args.world_size == 1 and args.distributed_timeout_seconds is not None:
        raise ConfigError(
            f"distributed_timeout_seconds={args.distributed_timeout_seconds} is how long the processes of an engine "
            "wait for one another; this engine is one process"
        )


def join_group(args: EngineArgs) -> None:
    """Return where the front is to be. Elsewhere run this process's ranks to their end, then exit.

    For commands, before they do what only the front may do, such as listening on a port.
    """
    if args.world_size == 1:
        return
    meeting = _meeting(args)
    if meeting.is_front:
        return
    store = _connect_store(meeting)
    front = json.loads(store.get(_FRONT_KEY))
    orders = [
        RankOrder(rank=rank, host=meeting.store_host, port=front["port"], key=front["key"], args=args)
        for rank in meeting.ranks
    ]
    if meeting.becomes is not None:
        os.environ.update(rank_environment(num_threads=_threads_per_rank(1)))
        sys.exit(run_rank(orders[0]))
    sys.exit(_run_node(orders))


def _meeting(args: EngineArgs) -> _Meeting:
    launcher = launcher_from_environment()
    if launcher is not None:
        return _meeting_of_launcher(args, launcher)
    share = args.world_size // args.nnodes
    several = args.nnodes > 1
    return _Meeting(
        store_host=args.master_addr if several else LOCALHOST,
        store_port=args.master_port or (DEFAULT_MASTER_PORT if several else 0),
        hosts_store=args.node_rank == 0,
        is_front=args.node_rank == 0,
        everyone_is_local=not several,
        ranks=tuple(range(args.node_rank * share, (args.node_rank + 1) * share)),
        becomes=None,
    )


def _meeting_of_launcher(args: EngineArgs, launcher: Launcher) -> _Meeting:
    if launcher.world_size != args.world_size:
        raise ConfigError(
            f"WORLD_SIZE={launcher.world_size} of the launcher is not data_parallel_size={args.data_parallel_size} * "
            f"tensor_parallel_size={args.tensor_parallel_size}"
        )
    if args.nnodes > 1 or args.master_port is not None:
        raise ConfigError("nnodes, node_rank, master_addr and master_port are the launcher's to say, which set RANK")
    is_front = launcher.rank == 0
    return _Meeting(
        store_host=launcher.master_addr,
        store_port=launcher.master_port,
        hosts_store=is_front and not launcher.hosts_store,
        is_front=is_front,
        everyone_is_local=False,
        ranks=(launcher.rank,),
        becomes=None if is_front else launcher.rank,
    )


# ---- the front


def _launch(args: EngineArgs, meeting: _Meeting, build: BuildEngine) -> EngineGroup:
    resolved = resolve(args)
    store = _connect_store(meeting)
    links = RankLinks(args.world_size, store=store)
    try:
        host = LOCALHOST if meeting.everyone_is_local else ""
        with socket.create_server((host, 0), backlog=args.world_size) as server:
            port, key = server.getsockname()[1], secrets.token_hex(32)
            if not meeting.everyone_is_local:
                store.set(_FRONT_KEY, json.dumps({"port": port, "key": key}))
            for rank in meeting.ranks:
                order = RankOrder(rank=rank, host=LOCALHOST, port=port, key=key, args=None)
                links.add_process(rank, _start_rank(order, num_ranks=len(meeting.ranks)))
            _accept_all(links, server, bytes.fromhex(key), args)
        links.send_all(
            Start(
                args=_pinned(args, resolved),
                build=build,
                store_host=meeting.store_host,
                store_port=store.port,
            )
        )
        tokenizer = resolved.model.load_tokenizer()
        links.wait_until_ready()
        _raise_failure(links)
    except BaseException:
        links.end(orderly=False)
        raise
    links.send_all(Wake())
    logger.info("%d ranks are ready: %s", args.world_size, resolved.topology)
    return EngineGroup(
        links,
        topology=resolved.topology,
        config=resolved.config,
        tokenizer=tokenizer,
        vocab_size=resolved.model.config.vocab_size,
        eos_token_ids=resolved.model.config.eos_token_ids,
        timeout_s=args.collective_timeout_seconds,
    )


def _pinned(args: EngineArgs, resolved: ResolvedEngine) -> EngineArgs:
    """What ranks are to resolve alike, whatever memory and compiler each finds."""
    return dataclasses.replace(
        args,
        kv_cache_memory_bytes=resolved.layout.total_bytes,
        max_model_len=resolved.config.max_model_len,
        quantization=resolved.config.quantization,
        max_num_waiting=UNLIMITED_WAITING,
    )


def _accept_all(links: RankLinks, server: socket.socket, key: bytes, args: EngineArgs) -> None:
    """Until every rank has said hello. Raises where one of ours ends before, or one does not come in time."""
    server.settimeout(_ACCEPT_S)
    deadline = time.monotonic() + _ARRIVAL_S
    while links.missing:
        if links.gone_before_hello:
            raise EngineDeadError(links.gone_before_hello)
        if time.monotonic() > deadline:
            raise EngineDeadError(f"ranks {links.missing} did not come within {_ARRIVAL_S} s")
        with contextlib.suppress(TimeoutError):
            accepted, _ = server.accept()
            connection = _authenticated(accepted, key)
            if connection is not None:
                hello: Hello = connection.recv()
                _check_same_flags(args, hello)
                if hello.rank not in links.missing:
                    raise ConfigError(f"rank {hello.rank} came twice: two machines were given the same node_rank")
                links.attach(hello.rank, connection)


def _authenticated(accepted: socket.socket, key: bytes) -> Connection | None:
    """The other side's proof that it knows the key, and ours; None, and closed, where it does not."""
    accepted.setblocking(True)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE_S, 0))
    connection = Connection(accepted.detach())
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
    except (AuthenticationError, EOFError, OSError) as error:
        logger.warning("a connection that is no rank's was refused: %s", error)
        connection.close()
        return None
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection


def _check_same_flags(args: EngineArgs, hello: Hello) -> None:
    if hello.args is None:
        return
    for field in dataclasses.fields(EngineArgs):
        mine, theirs = getattr(args, field.name), getattr(hello.args, field.name)
        if field.name != "node_rank" and mine != theirs:
            raise ConfigError(
                f"{field.name}={mine!r} here, {theirs!r} on the machine of rank {hello.rank}: all run one command"
            )


def _raise_failure(links: RankLinks) -> None:
    """The error that kept a rank from starting, of its own type where a user can meet it."""
    if not links.failed:
        return
    reason = links.diagnose()
    died = links.startup_error
    known = {error.__name__: error for error in (ConfigError, CheckpointError)}
    if died is not None and died.error_type in known:
        raise known[died.error_type](died.message)
    raise EngineDeadError(f"the ranks did not start: {reason}")


def _connect_store(meeting: _Meeting) -> TCPStore:
    try:
        return TCPStore(
            meeting.store_host,
            meeting.store_port,
            is_master=meeting.hosts_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=_ARRIVAL_S),
        )
    except RuntimeError as error:  # torch's DistError and its kin
        raise ConfigError(
            f"ranks cannot meet at master_addr={meeting.store_host} master_port={meeting.store_port}: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


# ---- ranks


def _start_rank(order: RankOrder, *, num_ranks: int) -> subprocess.Popen[bytes]:
    """A rank's process, in a session of its own: what is typed at the terminal is the front's."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "outrider.engine.worker"],
        stdin=subprocess.PIPE,
        stdout=2,  # standard output is the command's, whose last line may be JSON
        env=rank_environment(num_threads=_threads_per_rank(num_ranks)),
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: noticed where ranks are waited for
        process.stdin.write(order.to_json().encode() + b"\n")
        process.stdin.flush()
    return process


def _threads_per_rank(num_ranks: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def _run_node(orders: Sequence[RankOrder]) -> int:
    """A machine without the front: its ranks until all have ended; 0 if all were told to."""
    processes = [_start_rank(order, num_ranks=len(orders)) for order in orders]
    try:
        done = threading.Event()
        while not done.wait(0.1):
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:
                done.set()
        return 0 if not any(process.poll() for process in processes) else 1
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
