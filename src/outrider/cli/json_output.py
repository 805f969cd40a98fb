"""The one JSON line that a command with ``--json`` ends with, and the shapes that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from outrider.outputs import SpecCounters


def print_json_line(payload: Mapping[str, object]) -> None:
    """Last on standard output, whatever was printed before. ASCII, so that no encoding of it can fail."""
    sys.stdout.flush()
    print(json.dumps(payload, allow_nan=False), flush=True)


def spec_json(spec: SpecCounters) -> dict[str, object]:
    return {
        "rounds": spec.rounds,
        "offered": spec.offered,
        "accepted": spec.accepted,
        "emitted": spec.emitted,
        "accepted_length": spec.accepted_length,
        "per_position": [list(pair) for pair in spec.per_position],
    }
