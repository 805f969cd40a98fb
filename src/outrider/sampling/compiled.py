"""Drafting and accepting in one compiled call each: a ``SamplingBackend`` for logits on the CPU.

The target's rows all go through the call; those of a request with bans, biases or penalties are edited by
``processors.edit`` before. Drafting, such edits depend on the drafts ahead, so these requests are walked in torch, as
are all requests of a drafter without a ``CompiledHead``. Which way a request goes depends on itself alone.

``native/sampling.h`` and ``native/walk.h`` are the other half. Worst fault of this module: an address whose tensor is
gone or holds other shapes than C++ reads; hence every tensor of a call has a name until it returns.

Shape legend: as ``sampling/proposal.py``; N verify rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from outrider.ops.compiled_head import CompiledHead
from outrider.ops.native_kernels import Kernels, SampledStruct, VerificationStruct, WalkStruct, address
from outrider.sampling.filters import SLACK
from outrider.sampling.processors import edit
from outrider.sampling.proposal import Proposal, SequentialHead, columns_of_ids, propose
from outrider.sampling.rejection import Accepted
from outrider.sampling.state import LogitRow


class CompiledSampling:
    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._map = torch.empty(0, dtype=torch.int64)  # draft_to_target of the latest proposal that had one
        self._columns_of_map = self._map  # its inverse

    def propose(
        self,
        *,
        drafter: SequentialHead,
        base_logits_RGV: Tensor,
        hidden_RGD: Tensor,
        anchor_ids_R: Tensor,
        rows: Sequence[LogitRow],
        num_drafts_R: Sequence[int],
        confidence: bool,
    ) -> Proposal:
        head = drafter.compiled_head
        in_torch = [r for r, row in enumerate(rows) if head is None or row.state.edits_logits]
        if head is not None and not in_torch:
            return self._walk(head, base_logits_RGV, hidden_RGD, anchor_ids_R, rows, num_drafts_R, confidence)

        def walked_in_torch(requests: Sequence[int]) -> Proposal:
            return propose(
                drafter=drafter,
                base_logits_RGV=base_logits_RGV[requests],
                hidden_RGD=hidden_RGD[requests],
                anchor_ids_R=anchor_ids_R[requests],
                rows=[rows[r] for r in requests],
                num_drafts_R=[num_drafts_R[r] for r in requests],
                confidence=confidence,
            )

        if head is None or len(in_torch) == len(rows):
            return walked_in_torch(in_torch)
        rest = sorted(set(range(len(rows))) - set(in_torch))
        walked = self._walk(
            head,
            base_logits_RGV[rest],
            hidden_RGD[rest],
            anchor_ids_R[rest],
            [rows[r] for r in rest],
            [num_drafts_R[r] for r in rest],
            confidence,
        )
        return _merged(len(rows), ((in_torch, walked_in_torch(in_torch)), (rest, walked)))

    def _walk(
        self,
        head: CompiledHead,
        base_logits_RGV: Tensor,
        hidden_RGD: Tensor,
        anchor_ids_R: Tensor,
        rows: Sequence[LogitRow],
        num_drafts_R: Sequence[int],
        confidence: bool,
    ) -> Proposal:
        """Requests whose logits nothing edits."""
        requests, slots, columns = base_logits_RGV.shape
        assert len(rows) == requests == len(num_drafts_R), "one row and one number of drafts per request"
        assert all(not row.prefix for row in rows), "the first draft has no draft ahead of it"
        depth = max(num_drafts_R, default=0)
        assert 0 <= depth <= slots, f"{depth} drafts asked of a block of {slots} slots"
        if depth == 0:
            return Proposal.one_hot([()] * requests)
        keeps_q = not all(row.state.is_greedy for row in rows)
        base, anchors = base_logits_RGV.contiguous(), anchor_ids_R.contiguous()
        hidden = hidden_RGD if hidden_RGD.stride()[1:] == (hidden_RGD.shape[2], 1) else hidden_RGD.contiguous()
        ids = (c_int64 * (requests * depth))()
        q_GRV = torch.empty((depth if keeps_q else 1, requests, columns))
        confidence_RG = torch.empty((requests, depth if confidence else 0))
        arguments = WalkStruct(
            base=address(base, torch.float32),
            anchors=address(anchors, torch.int64),
            sampled=_sampled(rows),
            ids=ids,
            q=address(q_GRV, torch.float32),
            requests=requests,
            slots=slots,
            depth=depth,
            draft_vocab=columns,
            vocab=head.vocab_size,
            keeps_q=keeps_q,
        )
        if head.draft_to_target_V is not None:
            assert head.draft_to_target_V.shape == (columns,), f"{columns} columns of another draft vocabulary"
            arguments.draft_to_target = address(head.draft_to_target_V, torch.int64)
        if head.markov is not None:
            features, bias = head.markov.features_Vr, head.markov.bias
            assert features.shape == (head.vocab_size, bias.inputs), f"features {tuple(features.shape)}"
            assert bias.outputs == columns, f"a bias of {bias.outputs} columns for {columns}"
            arguments.bias, arguments.rank = bias.pointer, bias.inputs
            if features.dtype == torch.bfloat16:
                arguments.features_bf16 = address(features, torch.bfloat16)
            else:
                arguments.features = address(features, torch.float32)
        if confidence:
            assert head.confidence_X is not None, "this drafter has no confidence head"
            size, hidden_size = head.confidence_X.shape[0] - 1, hidden.shape[2]
            assert size in (hidden_size, hidden_size + arguments.rank), f"{size} confidence weights"
            assert hidden.shape[:2] == (requests, slots), f"hidden states {tuple(hidden.shape)}"
            arguments.confidence = address(head.confidence_X, torch.float32)
            arguments.confidences = address(confidence_RG, torch.float32)
            assert hidden.dtype == torch.float32, f"hidden states in {hidden.dtype}"
            arguments.hidden = hidden.data_ptr()  # the requests may lie apart
            arguments.hidden_size, arguments.hidden_stride = hidden_size, hidden.stride(0)
            arguments.confidence_size = size
        self._kernels.walk(arguments)
        return Proposal(
            draft_ids=tuple(tuple(ids[r * depth : r * depth + n]) for r, n in enumerate(num_drafts_R)),
            q_steps=q_GRV.unbind(0) if keeps_q else (),
            draft_to_target=head.draft_to_target_V,
            confidence_logits=confidence_RG,
        )

    def accept(
        self, *, logits_NV: Tensor, rows: Sequence[LogitRow], proposal: Proposal, widths: Sequence[int]
    ) -> list[Accepted]:
        num_requests, num_columns = len(widths), logits_NV.shape[1]
        starts = [0, *accumulate(widths)]
        assert starts[-1] == len(rows) == logits_NV.shape[0], f"widths {list(widths)} must add up to {len(rows)} rows"
        assert num_requests == len(proposal.draft_ids), "one width per request"
        firsts = [rows[start] for start in starts[:-1]]
        for start, width, first in zip(starts, widths, firsts, strict=False):
            assert rows[start + width - 1].position == first.position + width - 1, "a window's positions ascend by one"
        logits = edit(logits_NV, rows)
        drafts: list[int] = []
        for ids, width in zip(proposal.draft_ids, widths, strict=True):
            assert width <= len(ids) + 1, f"{width} rows for {len(ids)} drafts"
            drafts += (*ids[: width - 1], -1)
        accepted, last = (c_int32 * num_requests)(), (c_int64 * num_requests)()
        arguments = VerificationStruct(
            logits=address(logits, torch.float32),
            starts=(c_int32 * len(starts))(*starts),
            drafts=(c_int64 * len(drafts))(*drafts),
            sampled=_sampled(firsts),
            accepted=accepted,
            last=last,
            requests=num_requests,
            vocab=num_columns,
        )
        if proposal.q_steps:
            q_shape, draft_to_target = tuple(proposal.q_steps[0].shape), proposal.draft_to_target
            assert max(widths) - 1 <= len(proposal.q_steps), "a draft without what it was drawn from"
            assert q_shape[0] == num_requests, f"q of shape {q_shape} for {num_requests} requests"
            assert q_shape[1] <= num_columns, f"q of shape {q_shape} for {num_columns} columns"
            assert all(q.shape == q_shape for q in proposal.q_steps), "q of several shapes"
            arguments.q = (c_void_p * len(proposal.q_steps))(*[address(q, torch.float32) for q in proposal.q_steps])
            arguments.draft_vocab = q_shape[1]
            if draft_to_target is not None:
                assert draft_to_target.shape == (q_shape[1],), f"a map of {tuple(draft_to_target.shape)} for {q_shape}"
                column_of_id = self._columns_of(draft_to_target)
                assert column_of_id.shape[0] <= num_columns, "a draft vocabulary beyond the target's"
                arguments.draft_to_target = address(draft_to_target, torch.int64)
                arguments.column_of_id = address(column_of_id, torch.int64)
                arguments.mapped_ids = column_of_id.shape[0]
        self._kernels.verify(arguments)
        return [
            Accepted(n, (*ids[:n], token)) for n, ids, token in zip(accepted, proposal.draft_ids, last, strict=True)
        ]

    def _columns_of(self, draft_to_target_V: Tensor) -> Tensor:
        if self._map is not draft_to_target_V:
            self._map, self._columns_of_map = draft_to_target_V, columns_of_ids(draft_to_target_V)
        return self._columns_of_map


def _sampled(rows: Sequence[LogitRow]) -> ctypes.Array[SampledStruct]:
    """Of each request, whose row of its first token is given."""
    return (SampledStruct * len(rows))(*[_sampled_struct(row) for row in rows])


def _sampled_struct(row: LogitRow) -> SampledStruct:
    state = row.state
    params = state.params
    return SampledStruct(
        seed=state.seed,
        position=row.position,
        anchor=row.anchor_position,
        top_p=params.top_p,
        log_min_p=math.log(params.min_p) - SLACK if params.min_p > 0.0 else -math.inf,
        temperature=0.0 if state.is_greedy else params.temperature,
        top_k=max(params.top_k, 0),
    )


def _merged(num_requests: int, parts: Sequence[tuple[Sequence[int], Proposal]]) -> Proposal:
    """One proposal of parts that each hold some of the requests."""
    draft_ids: list[tuple[int, ...]] = [()] * num_requests
    for requests, part in parts:
        for r, ids in zip(requests, part.draft_ids, strict=True):
            draft_ids[r] = ids
    depth = max(len(part.q_steps) for _, part in parts)
    num_columns = max((q_RV.shape[1] for _, part in parts for q_RV in part.q_steps), default=0)
    q_GRV = torch.zeros((depth, num_requests, num_columns))
    confidence_RG = torch.zeros((num_requests, max(part.confidence_logits.shape[1] for _, part in parts)))
    for requests, part in parts:
        for k, q_RV in enumerate(part.q_steps):
            q_GRV[k, requests] = q_RV
        confidence_RG[requests, : part.confidence_logits.shape[1]] = part.confidence_logits
    return Proposal(
        draft_ids=tuple(draft_ids),
        q_steps=q_GRV.unbind(0),
        draft_to_target=next((part.draft_to_target for _, part in parts if part.draft_to_target is not None), None),
        confidence_logits=confidence_RG,
    )
