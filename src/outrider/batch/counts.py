"""Three counts that must never be mixed: requests, tokens, padded tokens.

Each is its own type without arithmetic, so that adding one to another does not type-check. There are exactly two ways
across: a pass's width turns requests into tokens, a tier turns tokens into padded tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RequestCount:
    """Requests of one rank in one pass, never scaled by a width. Graph tiers are chosen from this."""

    value: int

    def __post_init__(self) -> None:
        assert self.value >= 0, f"RequestCount({self.value}) must not be negative"

    def tokens(self, *, width: int) -> TokenCount:
        """Rows of a pass in which every request owns ``width`` rows."""
        assert width >= 1, f"width={width} must be at least 1"
        return TokenCount(self.value * width)


@dataclass(frozen=True, slots=True, order=True)
class TokenCount:
    """Real (non-padded) rows of one rank in one pass. Expert-parallel accounting uses this."""

    value: int

    def __post_init__(self) -> None:
        assert self.value >= 0, f"TokenCount({self.value}) must not be negative"

    def padded(self, *, extent: int) -> PaddedTokenCount:
        """The extent these rows are padded to; an extent below the real rows is a bug."""
        assert extent >= self.value, f"extent={extent} is below the {self.value} real rows"
        return PaddedTokenCount(extent)


@dataclass(frozen=True, slots=True, order=True)
class PaddedTokenCount:
    """Rows a pass runs over, padding included. Buffer shapes use this."""

    value: int

    def __post_init__(self) -> None:
        assert self.value >= 0, f"PaddedTokenCount({self.value}) must not be negative"
