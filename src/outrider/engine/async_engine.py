"""The asynchronous engine below the server: one thread runs the step loop, an event loop talks to it.

The thread owns the engine; nothing else touches it, but to interrupt it where it waits for ranks or for work. Commands
(add, abort) go in through a queue that the thread empties between steps; snapshots come out through each request's own
asyncio queue. Only the newest snapshot matters, so a slow reader costs memory for one. A step that raises ends the
engine: every reader gets ``EngineDeadError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from outrider.engine.engine import Engine
from outrider.errors import EngineDeadError, InvalidRequestError, OutriderError, QueueFullError
from outrider.logger import get_logger
from outrider.models.tokenizer import Tokenizer
from outrider.outputs import EngineStats, RequestOutput
from outrider.sampling_params import SamplingParams

logger = get_logger(__name__)
Command = Callable[[], None]


class _Mailbox:
    """The newest snapshot of one request, or the error that ended it; filled by the thread, read by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready = asyncio.Event()
        self._latest: RequestOutput | OutriderError | None = None

    def post(self, item: RequestOutput | OutriderError) -> None:
        """From the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._put, item)
        except RuntimeError:  # the reader's event loop is closed: nobody is left to read
            logger.debug("a snapshot came after its reader's event loop had closed")

    def _put(self, item: RequestOutput | OutriderError) -> None:
        self._latest = item
        self._ready.set()

    async def next(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        item = self._latest
        if isinstance(item, OutriderError):
            raise item
        assert item is not None
        return item


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    request_id: str
    mailbox: _Mailbox


class AsyncEngine:
    """Implements the server's ``AsyncEngineClient``."""

    def __init__(self, core: Engine, *, model_name: str) -> None:
        self.model_name = model_name
        self._core = core
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._mailboxes: dict[str, _Mailbox] = {}  # of the engine thread alone
        self._death: EngineDeadError | None = None
        self._draining = False
        self._stopping = False
        self._note_stats()
        self._num_waiting_to_enter = 0  # of the event loop alone: submissions not yet added by the thread
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._core.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._core.config.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._core.vocab_size

    @property
    def healthy(self) -> bool:
        return self._death is None

    def stats(self) -> EngineStats:
        """The engine's counters after its latest step."""
        return self._stats

    def rank_stats(self) -> tuple[EngineStats, ...]:
        """The same of each data-parallel rank."""
        return self._rank_stats

    async def generate(
        self, *, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative snapshots, the last one finished; leaving the loop early aborts the request."""
        if self._death is not None:
            raise self._death
        if self._draining:
            raise QueueFullError("the engine is shutting down and takes no new requests")
        mailbox = _Mailbox(asyncio.get_running_loop())
        submission = _Submission(
            prompt=prompt, prompt_token_ids=prompt_token_ids, params=params, request_id=request_id, mailbox=mailbox
        )
        self._submit(lambda: self._add(submission))
        finished = False
        try:
            while not finished:
                output = await mailbox.next()
                finished = output.finished
                yield output
        except OutriderError:
            finished = True  # the engine has ended it already, or never took it
            raise
        finally:
            if not finished:
                self._submit(lambda: self._abort(request_id, mailbox))

    async def abort(self, request_id: str) -> None:
        """End a request wherever it stands; its reader gets a last snapshot. Unknown ids are ignored."""
        self._submit(lambda: self._abort(request_id, None))

    async def shutdown(self, drain_s: float) -> None:
        """Finish running requests for at most ``drain_s`` seconds, abort the rest, end the thread."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + drain_s
        await self._flush_commands()
        while self._core.has_unfinished and self.healthy and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        self._submit(self._stop)
        await asyncio.to_thread(self._thread.join)

    async def _flush_commands(self) -> None:
        """Wait until the thread has taken everything that was submitted so far."""
        if not self._thread.is_alive():
            return
        loop = asyncio.get_running_loop()
        taken = asyncio.Event()

        def mark() -> None:
            loop.call_soon_threadsafe(taken.set)

        self._submit(mark)
        while self._thread.is_alive() and not taken.is_set():
            try:
                await asyncio.wait_for(taken.wait(), timeout=0.5)
            except TimeoutError:
                continue

    def _submit(self, command: Command) -> None:
        self._commands.put(command)
        self._core.interrupt()

    # ---- the engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                outputs = self._core.step() if self._core.has_unfinished else []
                self._note_stats()  # first: who has its answer finds it counted
                self._publish(outputs)
                if not self._core.has_unfinished and not self._stopping:
                    self._core.wait()
            self._core.close()
        except Exception as error:
            logger.exception("the engine loop ended by an error")
            self._death = _as_death(error)
            for mailbox in self._mailboxes.values():
                mailbox.post(self._death)
            self._mailboxes.clear()
            with contextlib.suppress(Exception):  # what broke in a step may be broken here too
                self._core.close()
            self._serve_dead()

    def _note_stats(self) -> None:
        self._rank_stats = self._core.rank_stats()
        self._stats = self._rank_stats[0] if len(self._rank_stats) == 1 else self._core.stats()

    def _serve_dead(self) -> None:
        """Answer what still comes in until shutdown, so that no reader waits for ever."""
        while not self._stopping:
            self._commands.get()()

    def _take_commands(self) -> None:
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, submission: _Submission) -> None:
        if self._death is not None:
            submission.mailbox.post(self._death)
            return
        try:
            self._core.add_request(
                request_id=submission.request_id,
                prompt=submission.prompt,
                prompt_token_ids=submission.prompt_token_ids,
                params=submission.params,
            )
        except OutriderError as error:
            submission.mailbox.post(error)
            return
        except Exception as error:  # this request's fault alone: the engine goes on
            logger.exception("request %s cannot be taken", submission.request_id)
            submission.mailbox.post(
                InvalidRequestError(f"the request cannot be taken: {type(error).__name__}: {error}")
            )
            return
        self._mailboxes[submission.request_id] = submission.mailbox

    def _abort(self, request_id: str, mailbox: _Mailbox | None) -> None:
        """Abort by id; with a mailbox only while the id still belongs to that reader."""
        if self._death is not None or (mailbox is not None and self._mailboxes.get(request_id) is not mailbox):
            return
        output = self._core.abort(request_id)
        if output is not None:
            self._publish([output])

    def _publish(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes[output.request_id]
            if output.finished:
                del self._mailboxes[output.request_id]
            mailbox.post(output)

    def _stop(self) -> None:
        if self._death is None:
            for request_id in list(self._mailboxes):
                self._abort(request_id, None)
        self._stopping = True


def _as_death(error: Exception) -> EngineDeadError:
    if isinstance(error, EngineDeadError):  # of a group of ranks, which knows more
        return error
    return EngineDeadError(f"the engine loop ended by {type(error).__name__}: {error}")
