"""The contract of ``Communicator`` as functions of a rank's ``ParallelState``: run on simulated and on real ranks.

Each returns what it computed, so that the callers can also compare ranks, and transports, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from outrider.parallel.communicator import Communicator
from outrider.parallel.reduction import sum_in_rank_order
from outrider.parallel.state import ParallelState

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32)
ROWS = (0, 1, 2, 3, 7, 64, 257)
COLUMNS = (1, 5, 48)


def tensor_of(rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """What ``rank`` brings: any rank can compute what any other has."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * rows + columns)
    return (torch.randn(rows, columns, generator=generator) * 100).to(dtype)


def check_group(group: Communicator) -> list[Tensor]:
    """Every collective against what a single process computes from all ranks' tensors."""
    results = []
    for dtype in DTYPES:
        for rows in ROWS:
            for columns in COLUMNS:
                results += _check_shape(group, rows, columns, dtype)
    return results


def _check_shape(group: Communicator, rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    size, rank = group.size, group.rank
    all_tensors = [tensor_of(r, rows, columns, dtype) for r in range(size)]
    total = sum_in_rank_order(all_tensors)
    reduced = group.all_reduce(all_tensors[rank].clone())
    assert reduced.dtype == dtype
    assert torch.equal(reduced, total)
    gathered = group.all_gather(all_tensors[rank].t().contiguous().t())  # strides need not be contiguous
    assert torch.equal(gathered, torch.cat(all_tensors))
    wide = [tensor_of(r, rows * size, columns, dtype) for r in range(size)]
    scattered = group.reduce_scatter(wide[rank].clone())
    assert torch.equal(scattered, sum_in_rank_order(wide)[rank * rows : (rank + 1) * rows])
    return [reduced, gathered]  # what is the same on every rank


def check_exchange(group: Communicator) -> None:
    """all_to_all with uneven counts, among them ranks that send nothing, receive nothing, or neither."""
    size, rank = group.size, group.rank
    matrices: tuple[Callable[[int, int], int], ...] = (
        lambda sender, receiver: 3 * sender + receiver,
        lambda sender, receiver: 2 if sender == 0 else 0,
        lambda sender, receiver: 4 if receiver == size - 1 else 0,
        lambda sender, receiver: 5 if (sender, receiver) == (0, size - 1) else 0,
        lambda sender, receiver: 0,
    )
    for count in matrices:
        for dtype in (torch.float32, torch.bfloat16):
            sent = [[count(s, r) for r in range(size)] for s in range(size)]
            brought = [tensor_of(s, sum(sent[s]), 3, dtype) for s in range(size)]
            received = group.all_to_all(brought[rank], sent[rank], [sent[s][rank] for s in range(size)])
            starts = [list(accumulate(row, initial=0)) for row in sent]
            expected = [brought[s][starts[s][rank] : starts[s][rank + 1]] for s in range(size)]
            assert torch.equal(received, torch.cat(expected))


def check_rows(group: Communicator) -> None:
    for step in range(20):
        rows = group.all_gather_row([group.rank, step, -(2**62), 7])
        assert rows == [(r, step, -(2**62), 7) for r in range(group.size)]


def check_all(parallel: ParallelState) -> list[list[Tensor]]:
    """All collectives of all groups: results that are alike on all ranks of the group, per group."""
    results = []
    for group in (parallel.world, parallel.attn_tp, parallel.attn_dp):
        check_rows(group)
        check_exchange(group)
        results.append(check_group(group))
    return results
