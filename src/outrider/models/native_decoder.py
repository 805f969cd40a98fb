"""The target in compiled passes: a ``TargetModel`` over packed weights, which ``pack_decoder`` makes of a ``Decoder``.

A pass is one call into C++ (``ops/native/decoder.cpp``): residual stream and taps are fp32, matrix products run in
int8 with exact integer groups, and a row's result is bitwise the same whatever else is in the pass. Embedding and LM
head stay reachable in their loaded form, since drafters are made with them; the layers' own weights are not kept.

Shape legend: as ``models/interface.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import ModelConfig, QuantizationName
from outrider.layers.attention.interface import CausalMetadata, LayerKV
from outrider.layers.embedding import Embedding
from outrider.models.decoder import Decoder, DecoderLayer
from outrider.models.interface import DecoderOutput
from outrider.models.native_stack import NativeStack, layer_format, pack_layers
from outrider.models.packed_weights import PackedWeights
from outrider.ops.native_kernels import Kernels
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def pack_decoder(kernels: Kernels, decoder: Decoder, *, quantization: QuantizationName) -> PackedWeights:
    layers = [layer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    packed = pack_layers(kernels, layers, decoder.norm, weight_format=layer_format(quantization), context=False)
    head = decoder.lm_head.weight.data
    matrix = PackedMatrix.pack(kernels, head, None, weight_format=WeightFormat.INT8, name="lm_head")
    tensors = {**packed.tensors, _EMBEDDING: decoder.embed_tokens.weight.data}
    if not decoder.config.tie_word_embeddings:
        tensors[_HEAD] = head
    return PackedWeights({**packed.matrices, "lm_head": matrix}, tensors)


class NativeDecoder(nn.Module):
    """See the module docstring."""

    crosses_dp_ranks = False  # dense layers only

    def __init__(self, kernels: Kernels, config: ModelConfig, weights: PackedWeights) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(0, config.hidden_size)
        self.embed_tokens.weight = nn.Parameter(weights.tensors[_EMBEDDING], requires_grad=False)
        self.lm_head_weight = self.embed_tokens.weight  # [V, D]
        if not config.tie_word_embeddings:
            self.lm_head_weight = nn.Parameter(weights.tensors[_HEAD], requires_grad=False)
        self._kernels = kernels
        self._stack = NativeStack(kernels, config, weights)
        self._head = weights.matrices["lm_head"]

    @classmethod
    def of(cls, kernels: Kernels, decoder: Decoder, *, quantization: QuantizationName) -> NativeDecoder:
        """Made of a loaded model, in memory."""
        return cls(kernels, decoder.config, pack_decoder(kernels, decoder, quantization=quantization))

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

    def finite_rows(self, logits_KV: Tensor) -> tuple[bool, ...]:
        return self._kernels.finite_rows(logits_KV)
