"""The drafter in compiled passes: a ``DrafterModel`` with its sequential head, over packed weights.

``pack_drafter`` makes these of a ``DSparkDrafter``; the embedding is the target's and not among them.

Block pass and context projection are one call into C++ each, with int8 weights whatever the target's: a drafter is
small, its own weights lie on no 4-bit grid, and what it loses it loses in accepted drafts. Its LM head, and the matrix
that turns Markov features into a bias, are int8 too; the rest of the sequential head stays the module it was. What is
recorded as drawn from is what these products give, so the output's distribution is the target's as ever.

Shape legend: as ``models/dspark.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import DrafterConfig
from outrider.layers.attention.interface import BlockMetadata, LayerKV
from outrider.layers.embedding import Embedding
from outrider.models.decoder import DecoderLayer
from outrider.models.dspark import ConfidenceHead, DSparkDrafter, MarkovHead
from outrider.models.native_stack import NativeStack, pack_layers, padded_vector
from outrider.models.packed_weights import PackedWeights
from outrider.ops.compiled_head import CompiledHead, MarkovTable
from outrider.ops.native_kernels import ContextStruct, Kernels, address
from outrider.ops.packed_matrix import PackedMatrix, WeightFormat

_MODULES = ("markov_head", "confidence_head")  # of the sequential head, which stay torch's


class NativeDrafter(nn.Module):
    """See the module docstring."""

    crosses_dp_ranks = False  # dense layers only
    draft_to_target_V: Tensor  # int64 [Vd]

    def __init__(
        self,
        kernels: Kernels,
        config: DrafterConfig,
        weights: PackedWeights,
        *,
        embedding_VD: nn.Parameter,
        dtype: torch.dtype,
    ) -> None:
        """``dtype``: what the modules of the sequential head compute in."""
        super().__init__()
        self.config = config
        self.slot_offset = 0 if config.sample_from_anchor else 1
        self.register_buffer("draft_to_target_V", weights.tensors["draft_to_target_V"], persistent=False)
        self.embed_tokens = Embedding(0, config.decoder.hidden_size)
        self.embed_tokens.weight = embedding_VD
        meta = torch.device("meta")  # every parameter is one of ``weights``
        self.markov_head = MarkovHead(config, dtype=dtype, device=meta) if config.markov_rank else None
        self.confidence_head = (
            ConfidenceHead(config, dtype=dtype, device=meta) if config.enable_confidence_head else None
        )
        for name in _MODULES:
            module = getattr(self, name)
            if module is not None:
                module.load_state_dict(_below(weights.tensors, name), assign=True)
                module.requires_grad_(False)
        self._weights = weights  # what the structs point into
        self._dtype = dtype
        self._kernels = kernels
        self._stack = NativeStack(kernels, config.decoder, weights)
        self._fc = weights.matrices["fc"]
        self._context_norm = address(weights.tensors["hidden_norm"], torch.float32)
        self._lm_head = weights.matrices["lm_head"]
        self._markov = weights.matrices["markov_w2"] if config.markov_rank else None
        self.compiled_head = self._compiled_head()

    def _compiled_head(self) -> CompiledHead | None:
        """None for heads whose features are more than a table."""
        markov = None
        if self.markov_head is not None and self._markov is not None:
            if self.markov_head.head_type != "vanilla":
                return None
            markov = MarkovTable(features_Vr=self.markov_head.markov_w1.weight.data, bias=self._markov)
        confidence_X = None
        if self.confidence_head is not None:
            weight, bias = self.confidence_head.proj.weight.data, self.confidence_head.proj.bias
            assert bias is not None
            confidence_X = torch.cat((weight[0].float(), bias.data.float()))
        identity = torch.equal(self.draft_to_target_V, torch.arange(self.config.draft_vocab_size))
        return CompiledHead(
            vocab_size=self.config.decoder.vocab_size,
            markov=markov,
            confidence_X=confidence_X,
            draft_to_target_V=None if identity else self.draft_to_target_V,
        )

    @classmethod
    def of(cls, kernels: Kernels, drafter: DSparkDrafter) -> NativeDrafter:
        """Made of a loaded drafter, in memory."""
        return cls(
            kernels,
            drafter.config,
            pack_drafter(kernels, drafter),
            embedding_VD=drafter.embed_tokens.weight,
            dtype=drafter.fc.weight.dtype,
        )

    def write_context(
        self,
        taps_NF: Tensor,
        positions_N: Tensor,
        kv_caches: Sequence[LayerKV],
        slot_mapping_N: Tensor,
    ) -> None:
        """Store every layer's keys and values of committed positions; rows with slot -1 are skipped."""
        assert taps_NF.shape[1] == self._fc.inputs, f"{taps_NF.shape[1]} tapped features, not {self._fc.inputs}"
        rows = taps_NF.shape[0]
        if rows == 0:
            return
        tables = self._stack.rotary
        caches, kv_is_bf16 = self._stack.caches(kv_caches)
        taps_NF, positions_N, slots_N = (
            taps_NF.float().contiguous(),
            positions_N.contiguous(),
            slot_mapping_N.contiguous(),
        )
        arguments = ContextStruct(
            fc=self._fc.pointer,
            norm=self._context_norm,
            taps=address(taps_NF, torch.float32),
            positions=address(positions_N, torch.int64),
            cos=address(tables.cos_PE, torch.float32),
            sin=address(tables.sin_PE, torch.float32),
            caches=caches,
            slots=address(slots_N, torch.int64),
            rows=rows,
            taps_width=taps_NF.shape[1],
            kv_is_bf16=kv_is_bf16,
            num_positions=tables.cos_PE.shape[0],
        )
        if not self._kernels.write_context(self._stack.struct, arguments):
            tables.cover(int(positions_N.max()) + 1)
            self.write_context(taps_NF, positions_N, kv_caches, slots_N)

    def forward(
        self,
        anchor_ids_R: Tensor,
        anchor_positions_R: Tensor,
        kv_caches: Sequence[LayerKV],
        metadata: BlockMetadata,
        experts: ExpertMetadata,
    ) -> Tensor:
        """Hidden of every block row after the final norm: fp32 [R, W, D]."""
        width, hidden = self.config.block_width, self.config.decoder.hidden_size
        assert metadata.block_width == width, f"metadata is for blocks of {metadata.block_width} rows, not {width}"
        requests = anchor_ids_R.shape[0]
        hidden_RWD = torch.empty(requests, width, hidden)
        self._stack.run_pass(
            self.embed_tokens.weight,
            anchor_ids_R,
            anchor_positions_R,
            kv_caches,
            starts_R1=None,
            lengths_R=metadata.context_lens_R,
            block_tables_RB=metadata.block_tables_RB,
            kv_block_size=metadata.kv_block_size,
            slots_N=None,
            max_position=metadata.max_context_len + width,
            hidden=hidden_RWD,
            block_width=width,
            mask_token_id=self.config.mask_token_id,
        )
        return hidden_RWD

    def compute_base_logits(self, hidden_KD: Tensor) -> Tensor:
        """fp32 [K, Vd], without the Markov bias."""
        return self._lm_head.linear(self._kernels, hidden_KD)

    # The sequential head: as DSparkDrafter's.

    def markov_state(self, num_requests: int) -> Tensor:
        """The state before the first slot, [R, r]; only the rnn head changes it."""
        return torch.zeros(num_requests, self.config.markov_rank, dtype=self._dtype)

    def markov_bias(self, prev_ids_R: Tensor, hidden_RD: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 bias [R, Vd] to the slot's base logits, and the next state."""
        if self.markov_head is None or self._markov is None:
            return torch.zeros(hidden_RD.shape[0], self.config.draft_vocab_size), state
        features_Rr, state = self.markov_head.features(prev_ids_R, hidden_RD.to(self._dtype), state)
        return self._markov.linear(self._kernels, features_Rr), state

    def confidence_logits(self, hidden_RD: Tensor, prev_ids_R: Tensor) -> Tensor:
        """fp32 [R]; only for drafters with a confidence head."""
        assert self.confidence_head is not None, "this drafter has no confidence head"
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            hidden_RD = torch.cat((hidden_RD, self.markov_head.markov_w1(prev_ids_R).float()), dim=-1)
        logits_R: Tensor = self.confidence_head(hidden_RD)
        return logits_R


def pack_drafter(kernels: Kernels, drafter: DSparkDrafter) -> PackedWeights:
    layers = [layer for layer in drafter.layers if isinstance(layer, DecoderLayer)]
    packed = pack_layers(kernels, layers, drafter.norm, weight_format=WeightFormat.INT8, context=True)
    matrices, tensors = dict(packed.matrices), dict(packed.tensors)
    heads = {"fc": drafter.fc.weight, "lm_head": drafter.lm_head.weight}
    if drafter.markov_head is not None:
        heads["markov_w2"] = drafter.markov_head.markov_w2.weight
    for name, weight in heads.items():
        matrices[name] = PackedMatrix.pack(kernels, weight.data, None, weight_format=WeightFormat.INT8, name=name)
    tensors["hidden_norm"] = padded_vector(drafter.hidden_norm.weight)
    tensors["draft_to_target_V"] = drafter.draft_to_target_V
    for name in _MODULES:
        module = getattr(drafter, name)
        if module is not None:
            tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    return PackedWeights(matrices, tensors)


def _below(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The state of the module ``name``."""
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
