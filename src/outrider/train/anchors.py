"""From stored sequences to one training batch: anchors, their slots, and the teacher row of every slot.

An anchor is an answer token whose successor exists. Slot k of the block at position p is given the tokens up to p + k
(teacher forcing) and predicts token p + 1 + k; it counts while that token exists. Invariants: a sequence's anchors are
distinct and sorted; an anchor sees exactly the rows of its sequence at positions below its own; what has no label is
not in the slot lists at all, so no matmul is spent on it.

Shape legend: B sequences, C context rows (the longest of the batch or a few more), A anchors per sequence, G = gamma
slots, N slots that count, U teacher rows (distinct; then some that teach nothing), F tapped width, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.data import Span, TokenStore

# Products of a size that was not there before cost ten times their time to set up, so sizes come in steps.
_CONTEXT_STEP, _TEACHER_STEP = 32, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorBatch:
    taps_BCF: Tensor
    positions_BC: Tensor  # int64
    anchor_ids_BA: Tensor  # int64
    anchor_positions_BA: Tensor  # int64
    visible_BAC: Tensor  # bool
    real_BA: Tensor  # bool: False where a sequence has fewer anchors than the batch is wide
    slot_N: Tensor  # int64: index into the flattened [B, A, G]
    previous_BAG: Tensor  # int64, token before each slot's prediction; the anchor at slot 0
    next_N: Tensor  # int64, the label: a target id
    greedy_N: Tensor  # fp32: 1 where the label was said at temperature 0, else 0
    teacher_row_N: Tensor  # int64, into the two below
    hidden_UD: Tensor  # the target's final hidden states
    lse_U: Tensor  # fp32


def valid_anchors(store: TokenStore, span: Span) -> Tensor:
    """Positions in the sequence that may be anchors, ascending."""
    answer_N = store.answer_C[span.start : span.stop - 1] > 0
    return answer_N.nonzero()[:, 0]


def choose_anchors(positions: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``count`` of them (or all there are), without replacement, sorted."""
    picked = torch.randperm(positions.shape[0], generator=generator)[:count]
    return positions[picked].sort().values


def build_batch(store: TokenStore, spans: Sequence[Span], anchors: Sequence[Tensor], *, num_slots: int) -> AnchorBatch:
    """``anchors``: one sorted tensor of positions per sequence, at least one position each."""
    most = max(chosen.shape[0] for chosen in anchors)
    context = -(-max(span.stop - span.start for span in spans) // _CONTEXT_STEP) * _CONTEXT_STEP
    position_BA = torch.stack([torch.cat((a, a[-1:].expand(most - a.shape[0]))) for a in anchors])
    real_BA = torch.stack([torch.arange(most) < a.shape[0] for a in anchors])
    start_B1 = torch.tensor([[span.start] for span in spans])
    length_B1 = torch.tensor([[span.stop - span.start] for span in spans])
    greedy_B = torch.tensor([float(span.temperature == 0) for span in spans])

    positions_BC = torch.arange(context).expand(len(spans), -1)
    rows_BC = start_B1 + torch.minimum(positions_BC, length_B1 - 1)  # padding repeats the last row; nobody sees it
    slots_G = torch.arange(num_slots)
    at_BAG = position_BA[:, :, None] + slots_G
    counts_BAG = real_BA[:, :, None] & (at_BAG + 1 < length_B1[:, :, None])
    row_BAG = start_B1[:, :, None] + torch.minimum(at_BAG, length_B1[:, :, None] - 1)
    slot_N = counts_BAG.flatten().nonzero()[:, 0]
    row_N = row_BAG.flatten()[slot_N]
    unique_U, teacher_row_N = torch.unique(row_N, return_inverse=True)
    spare = -len(unique_U) % _TEACHER_STEP
    hidden_UD = F.pad(store.hidden_CD[unique_U], (0, 0, 0, spare))
    lse_U = F.pad(store.lse_C[unique_U], (0, spare), value=torch.inf)  # such a row gives every token probability 0
    return AnchorBatch(
        taps_BCF=store.taps_CF[rows_BC],
        positions_BC=positions_BC,
        anchor_ids_BA=store.tokens_C[start_B1 + position_BA].long(),
        anchor_positions_BA=position_BA,
        visible_BAC=positions_BC[:, None, :] < position_BA[:, :, None],
        real_BA=real_BA,
        slot_N=slot_N,
        previous_BAG=store.tokens_C[row_BAG].long(),
        next_N=store.tokens_C[row_N + 1].long(),
        greedy_N=greedy_B.repeat_interleave(most * num_slots)[slot_N],
        teacher_row_N=teacher_row_N,
        hidden_UD=hidden_UD,
        lse_U=lse_U,
    )


class BatchPlan:
    """Which sequences make step s: a function of the seed and s alone, so that a resumed run continues exactly.

    Each epoch is shuffled, then sorted by length within pools of sequences, so that a batch wastes little on padding.
    """

    def __init__(self, store: TokenStore, spans: Sequence[Span], *, batch: int, anchors: int, seed: int) -> None:
        usable = [span for span in spans if valid_anchors(store, span).shape[0] > 0]
        assert usable, "no sequence has an anchor"
        self.store, self.spans, self.anchors, self.seed = store, usable, anchors, seed
        self.batch = min(batch, len(usable))
        self.batches_per_epoch = len(usable) // self.batch

    def at(self, step: int, *, num_slots: int) -> AnchorBatch:
        epoch, index = divmod(step, self.batches_per_epoch)
        spans = [self.spans[i] for i in self._epoch(epoch)[index]]
        generator = random_stream(self.seed, 0, step)
        chosen = [choose_anchors(valid_anchors(self.store, span), self.anchors, generator) for span in spans]
        return build_batch(self.store, spans, chosen, num_slots=num_slots)

    def _epoch(self, epoch: int) -> list[list[int]]:
        generator = random_stream(self.seed, 1, epoch)
        order = torch.randperm(len(self.spans), generator=generator).tolist()
        pool = 16 * self.batch
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: self.spans[i].stop - self.spans[i].start)
            batches += [near[i : i + self.batch] for i in range(0, len(near) - self.batch + 1, self.batch)]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[i] for i in shuffled]


def random_stream(*key: int) -> torch.Generator:
    """One stream per key. The generator keeps 32 bits of its seed, so the key is mixed down to them first."""
    mixed = 0
    for part in key:
        mixed = (mixed * 0x9E3779B1 + part + 0x7F4A7C15) % (1 << 32)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D % (1 << 32)
    return torch.Generator().manual_seed(mixed)
