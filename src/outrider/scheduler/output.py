"""What one step shall run. Frozen; the requests themselves change only in ``Scheduler.commit`` and ``finish``."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.scheduler.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Compute positions ``start .. start + length - 1``; their slots are allocated."""

    request: Request
    start: int
    length: int
    samples: bool  # the chunk ends the prompt of a request without output: its last row gives the first token

    def __post_init__(self) -> None:
        assert self.start >= 0, self.start
        assert self.length >= 1, self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Verify the anchor at position p = ``request.num_computed_tokens`` and ``verify_width - 1`` drafts behind it.

    The slots of p .. p + verify_width - 1 are allocated and within the context limit. Without ``drafting`` it is one
    row, because of the load, and no round of drafting.
    """

    request: Request
    verify_width: int
    drafting: bool = True

    def __post_init__(self) -> None:
        assert self.verify_width >= 1, self.verify_width
        assert self.drafting or self.verify_width == 1, self.verify_width


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    prefills: tuple[PrefillChunk, ...]  # oldest request first
    decodes: tuple[DecodeRow, ...]  # oldest request first
    preempted: tuple[Request, ...]  # lost their blocks in this schedule and wait again

    @property
    def num_batched_tokens(self) -> int:
        return sum(c.length for c in self.prefills) + sum(r.verify_width for r in self.decodes)

    @property
    def drafting(self) -> bool:
        """Whether any decode row is a round of drafting."""
        return any(row.drafting for row in self.decodes)

    @property
    def is_empty(self) -> bool:
        return not self.prefills and not self.decodes
