"""A plain paged pool around a decoder: what a runner does, reduced to what the tests of models need.

Every request gets its blocks from one shuffled list, so that neighbours in a sequence are not neighbours in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import ModelConfig
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.models.decoder import Decoder
from outrider.models.interface import DecoderOutput
from outrider.models.native_decoder import NativeDecoder

KV_BLOCK_SIZE = 4


def make_pool(
    config: ModelConfig,
    *,
    num_blocks: int,
    dtype: torch.dtype = torch.float32,
    tp_size: int = 1,
    block_size: int = KV_BLOCK_SIZE,
) -> list[LayerKV]:
    """NaN everywhere: whoever reads a slot that was not written shows it. Heads of one of ``tp_size`` ranks."""
    shape = (num_blocks * block_size, config.num_kv_heads // tp_size, config.head_dim)
    return [
        LayerKV(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
        for _ in range(config.num_layers)
    ]


@dataclass(frozen=True, slots=True)
class PassResult:
    output: DecoderOutput
    logits: list[Tensor]  # per request of the pass, [rows, V]


class PagedSequences:
    """Sequences that grow pass by pass."""

    def __init__(
        self,
        model: Decoder | NativeDecoder,
        *,
        requests: int,
        max_len: int,
        tp_size: int = 1,
        dtype: torch.dtype = torch.float32,
        block_size: int = KV_BLOCK_SIZE,
    ) -> None:
        self.model = model
        self.block_size = block_size
        blocks = -(-max_len // block_size)
        self.pool = make_pool(
            model.config, num_blocks=requests * blocks, dtype=dtype, tp_size=tp_size, block_size=block_size
        )
        order = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(11))
        self.tables_RB = order.view(requests, blocks).to(torch.int32)
        self.lengths = [0] * requests

    def run(
        self, new_tokens: Mapping[int, Sequence[int]], *, taps: tuple[int, ...] = (), padding_rows: int = 0
    ) -> PassResult:
        """One pass over ``new_tokens`` of some requests, in that order, with padding rows behind."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, seq_lens = [0], []
        for request, tokens in new_tokens.items():
            for offset, token in enumerate(tokens):
                position = self.lengths[request] + offset
                block = int(self.tables_RB[request, position // self.block_size])
                ids.append(token)
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
            self.lengths[request] += len(tokens)
            starts.append(len(ids))
            seq_lens.append(self.lengths[request])
        metadata = CausalMetadata(
            query_start_loc_R1=torch.tensor(starts, dtype=torch.int32),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables_RB=self.tables_RB[list(new_tokens)],
            slot_mapping_N=torch.tensor(slots + [-1] * padding_rows, dtype=torch.int64),
            kv_block_size=self.block_size,
            max_query_len=max((len(tokens) for tokens in new_tokens.values()), default=0),
            max_seq_len=max(seq_lens, default=0),
        )
        with torch.inference_mode():
            output = self.model(
                torch.tensor(ids + [0] * padding_rows, dtype=torch.int64),
                torch.tensor(positions + [0] * padding_rows, dtype=torch.int64),
                self.pool,
                metadata,
                taps,
                ExpertMetadata.single(len(ids) + padding_rows),
            )
            logits_NV = self.model.compute_logits(output.hidden_ND)
        logits = [logits_NV[start:end] for start, end in pairwise(starts)]
        return PassResult(output, logits)
