"""One builder method per pass: the only places where forward batches are made, for busy and idle ranks alike.

A builder takes the pass's plan and this rank's rows, and fills every field from these two. Extents come from the plan:
without a tier the real rows, with one the tier's. Padding rows have token 0, position 0 and slot -1 (never written);
padding requests own no rows and see no context.

In a tier nothing but tensor contents may differ between batches: block tables have the width that the longest context
needs, and the integers of the metadata are bounds of the tier (the pass's width, the context limit), not of the rows.

Every tensor is made on the host, pinned where passes run on a CUDA device: a batch is checked without waiting for the
device, and the graph runner copies its inputs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.batch.attention_metadata import BlockMetadata, CausalMetadata
from outrider.batch.counts import RequestCount, TokenCount
from outrider.batch.expert_metadata import ExpertMetadata
from outrider.batch.forward_batch import DraftBatch, PrefillBatch, VerifyBatch
from outrider.batch.step_plan import PaddingMode, PassPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """One chunk of one request's prompt, at positions start .. start + len(token_ids) - 1."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    samples: bool  # the chunk's last row is sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One request to draft for; its context is every position below the anchor's."""

    anchor_id: int
    anchor_position: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """One request's window: the anchor at position start, then the drafts kept."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]


class BatchBuilder:
    def __init__(
        self, *, rank: int, kv_block_size: int, max_model_len: int, mask_padded_tokens: bool, pin_memory: bool = False
    ) -> None:
        """rank: the data-parallel one, of a plan's tuples."""
        self._rank = rank
        self._kv_block_size = kv_block_size
        self._max_model_len = max_model_len
        self._mask_padded_tokens = mask_padded_tokens
        self._pin_memory = pin_memory
        self._count_tensors: dict[int, Tensor] = {}  # never written to: a batch only ever reads or copies its own

    def prefill(self, plan: PassPlan, rows: Sequence[PrefillRow]) -> PrefillBatch:
        lengths = [len(row.token_ids) for row in rows]
        tokens = TokenCount(sum(lengths))
        ends = list(accumulate(lengths))
        token_ids, positions, metadata = self._causal(plan, rows, tokens)
        experts = self._experts(plan, tokens)
        (logit_rows,) = self._int64([end - 1 for end, row in zip(ends, rows, strict=True) if row.samples])
        return PrefillBatch(
            plan=plan,
            rank=self._rank,
            requests=RequestCount(len(rows)),
            tokens=tokens,
            num_tokens_non_padded=experts.num_tokens_non_padded,
            token_ids_N=token_ids,
            positions_N=positions,
            metadata=metadata,
            experts=experts,
            logit_rows_K=logit_rows,
        )

    def draft(self, plan: PassPlan, rows: Sequence[DraftRow]) -> DraftBatch:
        requests = RequestCount(len(rows))
        in_tier = plan.padding_mode is PaddingMode.TIER
        padded = plan.padded_requests[self._rank].value if in_tier else len(rows)
        fill = [0] * (padded - len(rows))
        context_lens = [row.anchor_position for row in rows] + fill
        tokens = requests.tokens(width=plan.width)
        anchor_ids, anchor_positions = self._int64([row.anchor_id for row in rows] + fill, context_lens)
        tables, width = self._block_tables([row.block_ids for row in rows], context_lens, padded, static=in_tier)
        lens, tables_X = self._int32(context_lens, tables)
        experts = self._experts(plan, tokens)
        return DraftBatch(
            plan=plan,
            rank=self._rank,
            requests=requests,
            tokens=tokens,
            num_tokens_non_padded=experts.num_tokens_non_padded,
            anchor_ids_R=anchor_ids,
            anchor_positions_R=anchor_positions,
            metadata=BlockMetadata(
                context_lens_R=lens,
                block_tables_RB=tables_X.view(padded, width),
                kv_block_size=self._kv_block_size,
                block_width=plan.width,
                max_context_len=self._max_model_len if in_tier else max(context_lens, default=0),
            ),
            experts=experts,
        )

    def verify(self, plan: PassPlan, rows: Sequence[VerifyRow]) -> VerifyBatch:
        tokens = TokenCount(sum(len(row.token_ids) for row in rows))
        token_ids, positions, metadata = self._causal(plan, rows, tokens)
        experts = self._experts(plan, tokens)
        batch = VerifyBatch(
            plan=plan,
            rank=self._rank,
            requests=RequestCount(len(rows)),
            tokens=tokens,
            num_tokens_non_padded=experts.num_tokens_non_padded,
            token_ids_N=token_ids,
            positions_N=positions,
            metadata=metadata,
            experts=experts,
        )
        widest = max((len(row.token_ids) for row in rows), default=0)  # in a tier the metadata does not say
        assert widest <= plan.width, f"a verify window of {widest} rows is wider than the pass, {plan.width}"
        return batch

    def _causal(
        self, plan: PassPlan, rows: Sequence[PrefillRow | VerifyRow], tokens: TokenCount
    ) -> tuple[Tensor, Tensor, CausalMetadata]:
        """Token ids, positions and metadata of ragged rows through the target, padded to the plan's extents."""
        in_tier = plan.padding_mode is PaddingMode.TIER
        if in_tier:
            padded_requests = plan.padded_requests[self._rank].value
            padded_tokens = plan.padded_tokens[self._rank].value
        else:
            padded_requests, padded_tokens = len(rows), tokens.value
        fill_rows, fill_requests = padded_tokens - tokens.value, padded_requests - len(rows)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self._kv_block_size
        for row in rows:
            end = row.start + len(row.token_ids)
            assert end <= len(row.block_ids) * size, f"rows up to {end} exceed {len(row.block_ids)} blocks of {size}"
            token_ids.extend(row.token_ids)
            positions.extend(range(row.start, end))
            slots.extend(row.block_ids[i // size] * size + i % size for i in range(row.start, end))
        lengths = [len(row.token_ids) for row in rows]
        seq_lens = [row.start + len(row.token_ids) for row in rows] + [0] * fill_requests
        starts = [0, *accumulate(lengths)]
        token_ids_N, positions_N, slots_N = self._int64(
            token_ids + [0] * fill_rows, positions + [0] * fill_rows, slots + [-1] * fill_rows
        )
        tables, width = self._block_tables([row.block_ids for row in rows], seq_lens, padded_requests, static=in_tier)
        starts_R1, seq_lens_R, tables_X = self._int32(starts + [starts[-1]] * fill_requests, seq_lens, tables)
        metadata = CausalMetadata(
            query_start_loc_R1=starts_R1,
            seq_lens_R=seq_lens_R,
            block_tables_RB=tables_X.view(padded_requests, width),
            slot_mapping_N=slots_N,
            kv_block_size=size,
            max_query_len=plan.width if in_tier else max(lengths, default=0),
            max_seq_len=self._max_model_len if in_tier else max(seq_lens, default=0),
        )
        return token_ids_N, positions_N, metadata

    def _block_tables(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], padded: int, *, static: bool
    ) -> tuple[list[int], int]:
        """[R, B] row by row, and B: of each request the blocks its length reaches, then zeros."""
        longest = max(lengths, default=0)
        assert longest <= self._max_model_len, f"{longest} positions exceed max_model_len={self._max_model_len}"
        width = -(-(self._max_model_len if static else longest) // self._kv_block_size)
        filled: list[int] = []
        for table, length in zip(tables, lengths, strict=False):
            used = -(-length // self._kv_block_size)
            filled += table[:used]
            filled += [0] * (width - used)
        filled += [0] * (width * (padded - len(tables)))
        return filled, width

    def _experts(self, plan: PassPlan, tokens: TokenCount) -> ExpertMetadata:
        return ExpertMetadata(
            dp_rank=self._rank,
            padded_tokens=tuple(count.value for count in plan.padded_tokens),
            num_tokens_non_padded=self._count_tensor(tokens.value),
            mask_padded_tokens=self._mask_padded_tokens,
            captured=plan.padding_mode is PaddingMode.TIER,
        )

    def _count_tensor(self, count: int) -> Tensor:
        """int32 [1]; the same one for the same count, since making it takes longer than most of a batch."""
        if count not in self._count_tensors:
            self._count_tensors[count] = self._on_host(torch.tensor([count], dtype=torch.int32))
        return self._count_tensors[count]

    def _int32(self, *parts: Sequence[int]) -> tuple[Tensor, ...]:
        return self._split(parts, np.int32)

    def _int64(self, *parts: Sequence[int]) -> tuple[Tensor, ...]:
        return self._split(parts, np.int64)

    def _split(self, parts: Sequence[Sequence[int]], dtype: type[np.integer[Any]]) -> tuple[Tensor, ...]:
        """A tensor of each part: pieces of one, since making one takes longer than all that is in it."""
        values = [value for part in parts for value in part]
        whole = self._on_host(torch.from_numpy(np.array(values, dtype=dtype)))
        return whole.split_with_sizes([len(part) for part in parts])

    def _on_host(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self._pin_memory else tensor
