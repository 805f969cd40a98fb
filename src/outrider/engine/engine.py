"""What the offline API, the asynchronous engine and the commands ask of an engine, whether it is one process or many.

``EngineCore`` is the engine of one process, ``EngineGroup`` the front of many. One thread at a time calls an engine;
``interrupt`` alone may come from any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.config import EngineConfig
from outrider.models.tokenizer import Tokenizer
from outrider.outputs import EngineStats, RequestOutput
from outrider.sampling_params import SamplingParams


class Engine(Protocol):
    config: EngineConfig  # limits such as max_num_seqs are those of one data-parallel rank
    tokenizer: Tokenizer
    vocab_size: int

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(
        self, *, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Queue a request: n sequences of one prompt, all of them or none.

        Raises InvalidRequestError or QueueFullError, and then nothing is left of it.
        """
        ...

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request wherever it stands; its last snapshot, or None if there is none of this id."""
        ...

    def step(self) -> list[RequestOutput]:
        """Go on, or wait for ranks that do; snapshots of the requests that got tokens or ended. May be empty.

        Raises EngineDeadError where ranks are processes of their own and one has failed.
        """
        ...

    def wait(self) -> None:
        """Of an engine without unfinished requests: block until ``interrupt``, or less. Raises as ``step`` does."""
        ...

    def interrupt(self) -> None:
        """Make the ``wait`` or waiting ``step`` that runs now, or else the next, return early."""
        ...

    def stats(self) -> EngineStats:
        """Counters of all ranks together."""
        ...

    def rank_stats(self) -> tuple[EngineStats, ...]:
        """Counters of each data-parallel rank."""
        ...

    def close(self) -> None:
        """End what runs and every process of the engine. A closed engine may be closed again."""
        ...
