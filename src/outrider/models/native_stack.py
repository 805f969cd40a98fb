"""Decoder layers in the form the compiled passes read, for target and drafter alike.

``pack_layers`` packs the weights of ``DecoderLayer`` modules; ``NativeStack`` points the C structs at packed weights
and keeps them alive. It covers dense layers on one rank; what it does not cover is refused by ``require_native`` while
the configuration is resolved.

Shape legend: N rows, E half a head's dimension, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.config import ModelConfig, QuantizationName
from outrider.errors import ConfigError
from outrider.layers.attention.interface import LayerKV
from outrider.layers.linear import Linear
from outrider.layers.mlp import SwiGLU
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import RotaryEmbedding
from outrider.models.decoder import DecoderLayer
from outrider.models.packed_weights import PackedWeights
from outrider.ops.native_kernels import (
    CacheStruct,
    DecoderStruct,
    Kernels,
    LayerStruct,
    PassStruct,
    address,
)
from outrider.ops.packed_matrix import GROUP, PackedMatrix, WeightFormat

_LARGEST_HEAD = 512  # what a buffer on the kernels' stack holds
_TABLE_STEP = 1024  # positions the rotary tables grow by


def require_native(config: ModelConfig, *, quantization: QuantizationName, what: str) -> None:
    """Refuse, by name, a model that the kernels do not cover. ``what``: "model" or "drafter"."""
    if config.moe is not None:
        raise ConfigError(
            f"quantization={quantization!r} covers dense layers only; the {what} has {config.moe.num_experts} experts. "
            "Use quantization='none'"
        )
    if config.head_dim > _LARGEST_HEAD:
        raise ConfigError(
            f"quantization={quantization!r} covers heads of at most {_LARGEST_HEAD}; the {what} has "
            f"head_dim={config.head_dim}"
        )


def layer_format(quantization: QuantizationName) -> WeightFormat:
    """Of the matrices in layers; the LM head is always int8, as in the files that 4-bit layers come from."""
    return WeightFormat.INT4 if quantization == "int4" else WeightFormat.INT8


class RotaryTables:
    """cos and sin by position, fp32 [P, E], computed once in steps of whole ranges.

    A row's phase must not depend on which rows share the pass; vectorised library functions give that only where the
    same element is computed in the same place, so every position is computed once.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary
        empty = torch.empty(0, rotary.head_dim // 2)
        self.cos_PE, self.sin_PE = empty, empty

    def cover(self, length: int) -> None:
        """Grow to at least ``length`` positions."""
        while self.cos_PE.shape[0] < length:
            start = self.cos_PE.shape[0]
            phase = self._rotary(torch.arange(start, start + _TABLE_STEP))
            self.cos_PE = torch.cat((self.cos_PE, phase.cos_NE)).contiguous()
            self.sin_PE = torch.cat((self.sin_PE, phase.sin_NE)).contiguous()


def pack_layers(
    kernels: Kernels, layers: Sequence[DecoderLayer], norm: RMSNorm, *, weight_format: WeightFormat, context: bool
) -> PackedWeights:
    """Layers and final norm. ``context``: k and v are packed a second time, alone, for a drafter's context."""
    matrices: dict[str, PackedMatrix] = {}
    vectors = {"final_norm": padded_vector(norm.weight)}

    def pack(name: str, linear: Linear, said: str, order: Sequence[int] | None = None) -> None:
        matrices[name] = PackedMatrix.pack(
            kernels, linear.weight.data, linear.bias, weight_format=weight_format, name=said, order=order
        )

    for index, layer in enumerate(layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"layers.{index}"
        assert isinstance(mlp, SwiGLU), f"{name}: {type(mlp).__name__} is no dense MLP"
        pack(f"{name}.qkv", attention.qkv_proj, f"{name}.self_attn.qkv_proj")
        pack(f"{name}.output", attention.o_proj, f"{name}.self_attn.o_proj")
        inner = mlp.down_proj.weight.shape[1]
        pack(f"{name}.gate_up", mlp.gate_up_proj, f"{name}.mlp.gate_up_proj", gate_up_order(inner))
        pack(f"{name}.down", mlp.down_proj, f"{name}.mlp.down_proj")
        if context:
            rows = attention.qkv_proj.weight.shape[0]
            first = attention.num_heads * attention.head_dim
            pack(f"{name}.key_value", attention.qkv_proj, f"{name}.self_attn.kv_proj", range(first, rows))
        vectors[f"{name}.input_norm"] = padded_vector(layer.input_layernorm.weight)
        vectors[f"{name}.post_norm"] = padded_vector(layer.post_attention_layernorm.weight)
        for field, head_norm in (("query_norm", attention.q_norm), ("key_norm", attention.k_norm)):
            if isinstance(head_norm, RMSNorm):
                vectors[f"{name}.{field}"] = padded_vector(head_norm.weight)
    return PackedWeights(matrices, vectors)


def padded_vector(weight: Tensor) -> Tensor:
    """A norm's weights in fp32, padded with zeros to whole groups."""
    return F.pad(weight.data.float(), (0, -weight.numel() % GROUP)).contiguous()


class NativeStack:
    """Layers and final norm over ``weights``, which hold what ``pack_layers`` gives and maybe more."""

    def __init__(self, kernels: Kernels, config: ModelConfig, weights: PackedWeights) -> None:
        self.kernels = kernels
        self.config = config
        self.rotary = RotaryTables(
            RotaryEmbedding(
                config.rope, head_dim=config.head_dim, max_position_embeddings=config.max_position_embeddings
            )
        )
        self._weights = weights
        self._caches: Sequence[LayerKV] = ()
        self._cache_structs = (CacheStruct * config.num_layers)()
        self._layers = (LayerStruct * config.num_layers)()
        for index, struct in enumerate(self._layers):
            self._fill(struct, f"layers.{index}")
        self.struct = DecoderStruct(
            layers=self._layers,
            final_norm=self._vector("final_norm", config.hidden_size),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )

    @property
    def weight_bytes(self) -> int:
        """Of the packed matrices in layers."""
        return sum(m.data.numel() for name, m in self._weights.matrices.items() if name.startswith("layers."))

    def _vector(self, name: str, size: int) -> int:
        vector = self._weights.tensors[name]
        assert vector.numel() == -(-size // GROUP) * GROUP, f"{name}: {vector.numel()} elements for {size}"
        return address(vector, torch.float32)

    def _fill(self, struct: LayerStruct, name: str) -> None:
        config, matrices = self.config, self._weights.matrices
        for field in ("qkv", "output", "gate_up", "down"):
            setattr(struct, field, matrices[f"{name}.{field}"].struct)
        if f"{name}.key_value" in matrices:
            struct.key_value = matrices[f"{name}.key_value"].struct
        for field in ("input_norm", "post_norm"):
            setattr(struct, field, self._vector(f"{name}.{field}", config.hidden_size))
        if config.qk_norm:
            for field in ("query_norm", "key_norm"):
                setattr(struct, field, self._vector(f"{name}.{field}", config.head_dim))

    def caches(self, kv_caches: Sequence[LayerKV]) -> tuple[object, bool]:
        """The structs of these pools, and whether they hold bfloat16. Filled anew only for other pools."""
        if kv_caches is not self._caches:
            assert len(kv_caches) == len(self._layers), f"{len(kv_caches)} caches for {len(self._layers)} layers"
            shape = (self.config.num_kv_heads, self.config.head_dim)
            for struct, kv in zip(self._cache_structs, kv_caches, strict=True):
                assert kv.key_SHD.shape[1:] == kv.value_SHD.shape[1:] == shape, f"a pool of {kv.key_SHD.shape}"
                assert kv.key_SHD.dtype == kv_caches[0].key_SHD.dtype, "pools of several types"
                struct.key = address(kv.key_SHD, torch.float32, torch.bfloat16)
                struct.value = address(kv.value_SHD, kv.key_SHD.dtype)
            self._caches = kv_caches
        return self._cache_structs, kv_caches[0].key_SHD.dtype == torch.bfloat16

    def run_pass(
        self,
        embedding_VD: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKV],
        *,
        starts_R1: Tensor | None,
        lengths_R: Tensor,
        block_tables_RB: Tensor,
        kv_block_size: int,
        slots_N: Tensor | None,
        max_position: int,
        hidden: Tensor,
        tap_layer_ids: tuple[int, ...] = (),
        taps_NF: Tensor | None = None,
        block_width: int = 0,
        mask_token_id: int = 0,
    ) -> None:
        """All layers and the final norm over the rows of ``token_ids``, into ``hidden`` and ``taps_NF``, fp32.

        ``slots_N``: where causal rows' keys and values go. With a ``block_width`` there are none, and no ``starts_R1``:
        token ids and positions are the anchors', each followed by mask tokens; a block's rows see one another and enter
        no pool. ``max_position``: no row stands there or beyond.
        """
        assert (block_width > 0) == (slots_N is None) == (starts_R1 is None), "either blocks or causal rows"
        self.rotary.cover(max_position)
        caches, kv_is_bf16 = self.caches(kv_caches)
        in_bf16 = embedding_VD.dtype == torch.bfloat16
        tap_layers = (c_int32 * len(tap_layer_ids))(*tap_layer_ids)
        arguments = PassStruct(
            embedding=None if in_bf16 else address(embedding_VD, torch.float32),
            embedding_bf16=address(embedding_VD, torch.bfloat16) if in_bf16 else None,
            token_ids=address(token_ids, torch.int64),
            positions=address(positions, torch.int64),
            cos=address(self.rotary.cos_PE, torch.float32),
            sin=address(self.rotary.sin_PE, torch.float32),
            caches=caches,
            slots=None if slots_N is None else address(slots_N, torch.int64),
            starts=None if starts_R1 is None else address(starts_R1, torch.int32),
            lengths=address(lengths_R, torch.int32),
            tables=address(block_tables_RB, torch.int32),
            tap_layers=tap_layers,
            taps=None if taps_NF is None else address(taps_NF, torch.float32),
            hidden=address(hidden, torch.float32),
            rows=token_ids.numel() * max(block_width, 1),
            requests=lengths_R.shape[0],
            table_width=block_tables_RB.shape[1],
            block_size=kv_block_size,
            num_taps=len(tap_layer_ids),
            kv_is_bf16=kv_is_bf16,
            vocab_size=embedding_VD.shape[0],
            num_positions=self.rotary.cos_PE.shape[0],
            block_width=block_width,
            mask_id=mask_token_id,
        )
        self.kernels.run_pass(self.struct, arguments)


def gate_up_order(inner: int) -> list[int]:
    """Rows of a merged [gate; up] weight by panels of 16 in the order gate, up, gate, up; -1 beyond ``inner``."""
    order = []
    for start in range(0, -(-inner // GROUP) * GROUP, 16):
        rows = [row if row < inner else -1 for row in range(start, start + 16)]
        order += rows
        order += [row if row < 0 else row + inner for row in rows]
    return order
