"""Processing written down once more, slowly: one row, Python floats, a full sort."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.sampling.filters import SLACK
from outrider.sampling_params import SamplingParams


def edited_logits(
    logits: Sequence[float], *, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: int
) -> list[float]:
    """min_tokens, bias and penalties for a row whose whole history is prompt + output."""
    out = list(logits)
    if len(output) < params.min_tokens:
        for token_id in (eos, *params.stop_token_ids):
            out[token_id] = -math.inf
    for token_id, bias in params.logit_bias.items():
        out[token_id] += bias
    for token_id in {*prompt, *output}:
        times = list(output).count(token_id)
        value = out[token_id]
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        out[token_id] = value - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    return out


def filtered_probs(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k, top-p, renormalised."""
    scaled = [value / params.temperature for value in logits]
    largest = max(scaled)
    masses = [math.exp(value - largest) for value in scaled]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    order = [i for i in order if params.min_p == 0.0 or masses[i] >= params.min_p * (1 - SLACK)]
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(masses[i] for i in order)
    kept: list[int] = []
    reached = 0.0
    for i in order:
        if kept and params.top_p < 1.0 and reached >= (params.top_p - SLACK) * total:
            break
        kept.append(i)
        reached += masses[i]
    return [masses[i] / reached if i in set(kept) else 0.0 for i in range(len(scaled))]


def argmax(logits: Sequence[float]) -> int:
    return max(range(len(logits)), key=lambda i: (logits[i], -i))
