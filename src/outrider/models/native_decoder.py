"""The target in compiled passes: a ``TargetModel`` made from a loaded ``Decoder``, with quantised weights.

A pass is one call into C++ (``ops/native/decoder.cpp``): residual stream and taps are fp32, matrix products run in
int8 with exact integer groups, and a row's result is bitwise the same whatever else is in the pass. Embedding and LM
head stay reachable in their loaded form, since drafters share them; the layers' own weights are not kept.

Shape legend: as ``models/interface.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import QuantizationName
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.models.decoder import Decoder, DecoderLayer
from outrider.models.interface import DecoderOutput
from outrider.models.native_stack import NativeStack, layer_format
from outrider.ops.native_kernels import Kernels
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat


class NativeDecoder(nn.Module):
    """See the module docstring."""

    crosses_dp_ranks = False  # dense layers only

    def __init__(self, kernels: Kernels, decoder: Decoder, *, quantization: QuantizationName) -> None:
        super().__init__()
        layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
        self.config = decoder.config
        self.embed_tokens = decoder.embed_tokens
        self.lm_head = decoder.lm_head
        self._kernels = kernels
        self._stack = NativeStack(
            kernels,
            decoder.config,
            layers,
            decoder.norm,
            decoder.rotary,
            weight_format=layer_format(quantization),
            context=False,
        )
        self._head = PackedMatrix.pack(
            kernels, decoder.lm_head.weight.data, None, weight_format=WeightFormat.INT8, name="lm_head"
        )

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        kv_caches: Sequence[LayerKV],
        metadata: CausalMetadata,
        tap_layer_ids: tuple[int, ...],
        experts: ExpertMetadata,
    ) -> DecoderOutput:
        """Padding rows are not computed: their hidden states and taps are zero."""
        rows, hidden = token_ids_N.shape[0], self.config.hidden_size
        output = DecoderOutput(
            hidden_ND=torch.zeros(rows, hidden), taps_NF=torch.zeros(rows, len(tap_layer_ids) * hidden)
        )
        self._stack.run_pass(
            self.embed_tokens.weight,
            token_ids_N,
            positions_N,
            kv_caches,
            starts_R1=metadata.query_start_loc_R1,
            lengths_R=metadata.seq_lens_R,
            block_tables_RB=metadata.block_tables_RB,
            kv_block_size=metadata.kv_block_size,
            slots_N=metadata.slot_mapping_N,
            max_position=metadata.max_seq_len,
            hidden=output.hidden_ND,
            tap_layer_ids=tap_layer_ids,
            taps_NF=output.taps_NF,
        )
        return output

    @property
    def weight_bytes(self) -> int:
        """What a pass of any size reads of weights, the LM head included."""
        return self._stack.weight_bytes + self._head.data.numel()

    def compute_logits(self, hidden_KD: Tensor) -> Tensor:
        """fp32 [K, V]."""
        return self._head.linear(self._kernels, hidden_KD)
