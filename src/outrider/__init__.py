"""Outrider: LLM inference whose decoding is DSpark speculative decoding, with exactly the target's output.

``from outrider import LLM, SamplingParams`` is the offline API; ``outrider --help`` lists the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider.outputs import CompletionOutput, RequestOutput
    from outrider.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "outrider.engine.llm",
    "SamplingParams": "outrider.sampling_params",
    "RequestOutput": "outrider.outputs",
    "CompletionOutput": "outrider.outputs",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``outrider --help`` does not load torch."""
    if name not in _LAZY:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
