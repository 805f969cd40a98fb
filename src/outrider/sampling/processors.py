"""From raw logits to the distributions a pass samples from, in vLLM's order.

1. min_tokens: end-of-sequence and stop tokens are impossible while the row's history is too short;
2. logit_bias is added;
3. repetition, then frequency and presence penalties, each row with its own history (prompt + output + prefix);
4. greedy rows take the argmax; the others divide by temperature;
5. min-p, top-k, top-p (``filters``), softmax.

The same call serves the target (columns are token ids) and a drafter with a reduced vocabulary (``column_of_id``
says where a token id is; edits of absent ids fall away). The input is never changed.

Shape legend: N rows, V columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from outrider.sampling.filters import filter_probs
from outrider.sampling.state import LogitRow, SequenceState

# A repetition penalty beyond this, or its inverse, acts like it: fp32 would make it 0 or infinity, and the row NaN.
_LEAST_PENALTY = 1e-30


@dataclass(frozen=True, slots=True)
class Distribution:
    """What each row is sampled from. A row is either greedy (only argmax is set) or not (only probs is set)."""

    greedy_N: Tensor  # bool, on the CPU
    argmax_N: Tensor  # int64; -1 at rows that are not greedy
    probs_NV: Tensor  # fp32, rows sum to 1; zeros at greedy rows; [0, V] if every row is greedy


def process(logits_NV: Tensor, rows: Sequence[LogitRow], *, column_of_id: Tensor | None = None) -> Distribution:
    """Distributions of fp32 logits, one ``LogitRow`` per row.

    ``column_of_id`` int64 maps token id to column, -1 where there is none; None: columns are token ids.
    """
    assert len(rows) == logits_NV.shape[0], f"{len(rows)} rows for logits of shape {tuple(logits_NV.shape)}"
    logits_NV = edit(logits_NV, rows, column_of_id=column_of_id)
    num_columns, device = logits_NV.shape[1], logits_NV.device
    greedy = [row.state.is_greedy for row in rows]
    greedy_N = torch.tensor(greedy, dtype=torch.bool)
    if all(greedy):
        return Distribution(greedy_N, _argmax(logits_NV), logits_NV.new_empty((0, num_columns)))
    if not any(greedy):
        no_argmax_N = torch.full((len(rows),), -1, dtype=torch.int64, device=device)
        return Distribution(greedy_N, no_argmax_N, _probs(logits_NV, [row.state for row in rows]))
    is_greedy_N = greedy_N.to(device)
    argmax_N = torch.where(is_greedy_N, _argmax(logits_NV), -1)
    probs_NV = torch.zeros_like(logits_NV)
    probs_NV[~is_greedy_N] = _probs(logits_NV[~is_greedy_N], [row.state for row in rows if not row.state.is_greedy])
    return Distribution(greedy_N, argmax_N, probs_NV)


def edit(logits_NV: Tensor, rows: Sequence[LogitRow], *, column_of_id: Tensor | None = None) -> Tensor:
    """A copy with min_tokens bans, logit_bias and penalties applied, or the logits themselves where no row has any."""
    if not any(row.state.edits_logits for row in rows):
        return logits_NV
    out_NV = logits_NV.clone()
    start = 0
    for _, group in groupby(rows, key=lambda row: id(row.state)):  # rows of a request are neighbours
        group_rows = list(group)
        stop = start + len(group_rows)
        if group_rows[0].state.edits_logits:
            _edit_sequence(out_NV[start:stop], group_rows, column_of_id)
        start = stop
    return out_NV


def _argmax(logits_NV: Tensor) -> Tensor:
    """The first largest column of each row, int64 [N]."""
    if logits_NV.device.type == "cpu":  # numpy takes a twentieth of torch's time on one core
        return torch.from_numpy(logits_NV.detach().numpy().argmax(-1))
    return logits_NV.argmax(-1)


def _probs(logits_NV: Tensor, states: Sequence[SequenceState]) -> Tensor:
    """Temperature, filters and softmax of rows none of which is greedy."""
    temperatures = [state.params.temperature for state in states]
    if any(t != 1.0 for t in temperatures):
        logits_NV = logits_NV / torch.tensor(temperatures, dtype=torch.float32, device=logits_NV.device)[:, None]
    filtered = [i for i, state in enumerate(states) if state.filters]
    if len(filtered) == len(states):
        return filter_probs(logits_NV, [state.params for state in states])
    probs_NV = logits_NV.softmax(-1)
    if filtered:
        index = torch.tensor(filtered, device=logits_NV.device)
        probs_NV[index] = filter_probs(logits_NV[index], [states[i].params for i in filtered])
    return probs_NV


def _edit_sequence(block_JV: Tensor, rows: Sequence[LogitRow], column_of_id: Tensor | None) -> None:
    """Edit in place the J rows of one sequence."""
    state, device = rows[0].state, block_JV.device
    params, num_output = state.params, len(state.output_token_ids)
    num_banned_rows = sum(num_output + len(row.prefix) < params.min_tokens for row in rows)
    if num_banned_rows and state.banned_token_ids:
        columns, _ = _columns(state.banned_token_ids, column_of_id, device)
        for j, row in enumerate(rows):
            if num_output + len(row.prefix) < params.min_tokens:
                block_JV[j, columns] = -torch.inf
    if state.bias_items:
        columns, present = _columns([token_id for token_id, _ in state.bias_items], column_of_id, device)
        bias = torch.tensor([value for _, value in state.bias_items], dtype=block_JV.dtype, device=device)
        block_JV[:, columns] += bias[present]
    if state.has_penalties:
        _penalise(block_JV, rows, column_of_id)


def _penalise(block_JV: Tensor, rows: Sequence[LogitRow], column_of_id: Tensor | None) -> None:
    """Penalties of J rows of one sequence; U is the number of different tokens in any of their histories."""
    state, device = rows[0].state, block_JV.device
    params, counts = state.params, state.penalty_counts
    slot_of_id: dict[int, int] = {}  # of prefix tokens that are not in the sequence yet
    for row in rows:
        for token_id in row.prefix:
            if token_id not in counts:
                slot_of_id.setdefault(token_id, len(counts) + len(slot_of_id))
    ids = [*counts, *slot_of_id]
    base_U = torch.tensor([*counts.values(), *[0] * len(slot_of_id)], dtype=torch.float32)
    times_JU = base_U.expand(len(rows), -1).clone()  # times emitted
    seen_JU = torch.ones_like(times_JU, dtype=torch.bool)
    seen_JU[:, len(counts) :] = False
    if any(row.prefix for row in rows):
        slots = {token_id: slot for slot, token_id in enumerate(ids)}
        for j, row in enumerate(rows):
            for token_id in row.prefix:
                times_JU[j, slots[token_id]] += 1
                seen_JU[j, slots[token_id]] = True

    columns, present = _columns(ids, column_of_id, device)
    times_JU, seen_JU = times_JU.to(device)[:, present], seen_JU.to(device)[:, present]
    logits_JU = block_JV[:, columns]
    if params.repetition_penalty != 1.0:
        penalty = min(max(params.repetition_penalty, _LEAST_PENALTY), 1 / _LEAST_PENALTY)
        scaled_JU = torch.where(logits_JU > 0, logits_JU / penalty, logits_JU * penalty)
        logits_JU = torch.where(seen_JU, scaled_JU, logits_JU)
    logits_JU = logits_JU - params.frequency_penalty * times_JU - params.presence_penalty * (times_JU > 0)
    block_JV[:, columns] = logits_JU


def _columns(ids: Sequence[int], column_of_id: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Columns of the ids that have one, and which ids those are (bool over ``ids``)."""
    ids_U = torch.tensor(ids, dtype=torch.int64, device=device)
    if column_of_id is None:
        return ids_U, torch.ones_like(ids_U, dtype=torch.bool)
    # Ids behind the end of the map have no column either.
    known_U = ids_U < column_of_id.shape[0]
    columns_U = torch.where(known_U, column_of_id[ids_U.clamp(max=column_of_id.shape[0] - 1)], -1)
    present_U = columns_U >= 0
    return columns_U[present_U], present_U
