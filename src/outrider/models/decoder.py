"""The dense decoder: one module for Llama and Qwen3, told apart only by its ``ModelConfig``.

Parameter names are those of the checkpoints without the leading ``model.``, except that q/k/v and gate/up are merged
(see ``layers.checkpoint.checkpoint_views``). Taps are raw residual streams: -1 the embedding output, i the output of
layer i, before any norm. Parameters are created uninitialised; a loader accounts for every one of them.

Shape legend: N rows, K rows that need logits, D hidden size, V vocabulary, F = taps * D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import torch
from torch import Tensor, nn

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import ModelConfig
from outrider.layers.attention.interface import AttentionBackend, CausalMetadata, LayerKV
from outrider.layers.attention.projections import AttentionProjections
from outrider.layers.checkpoint import size_for_rank
from outrider.layers.embedding import Embedding, LMHead
from outrider.layers.mlp import SwiGLU
from outrider.layers.moe import SparseMoE
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import RotaryEmbedding, RotaryPhase
from outrider.models.interface import DecoderOutput
from outrider.parallel.communicator import Communicator
from outrider.parallel.state import ParallelState


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream.

    ``tp`` shares the heads and the MLP's columns: ``parallel.attn_tp`` in a target, a group of one in a drafter. The
    rows handed in are the same on all ranks of ``parallel.attn_tp`` either way.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_index: int,
        parallel: ParallelState,
        tp: Communicator,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype, device=device)
        self.self_attn = AttentionProjections(config, tp=tp, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype, device=device)
        self.mlp: SwiGLU | SparseMoE
        if config.moe is not None and config.moe.sparse_layers[layer_index]:
            self.mlp = SparseMoE(config.hidden_size, config.moe, parallel=parallel, dtype=dtype, device=device)
        else:
            self.mlp = SwiGLU(
                config.hidden_size, config.intermediate_size, bias=config.mlp_bias, tp=tp, dtype=dtype, device=device
            )

    def forward(
        self,
        residual_ND: Tensor,
        phase: RotaryPhase,
        *,
        backend: AttentionBackend,
        kv: LayerKV,
        metadata: CausalMetadata,
        experts: ExpertMetadata,
    ) -> Tensor:
        query, key, value = self.self_attn.query_key_value(self.input_layernorm(residual_ND), phase)
        backend.write_kv(kv, key_NHD=key, value_NHD=value, slot_mapping_N=metadata.slot_mapping_N)
        attention = backend.causal(query, kv, metadata, scale=self.self_attn.scale)
        return self.add_mlp(residual_ND + self.self_attn.output(attention), experts)

    def add_mlp(self, residual_ND: Tensor, experts: ExpertMetadata) -> Tensor:
        """The layer's second half."""
        normed_ND = self.post_attention_layernorm(residual_ND)
        match self.mlp:
            case SparseMoE() as moe:
                mixed_ND = moe(normed_ND, experts)
            case SwiGLU() as dense:
                mixed_ND = dense(normed_ND)
            case _:
                assert_never(self.mlp)
        out_ND: Tensor = residual_ND + mixed_ND
        return out_ND


class Decoder(nn.Module):
    """A ``TargetModel``."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        parallel: ParallelState,
        backend: AttentionBackend,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_index=i, parallel=parallel, tp=parallel.attn_tp, dtype=dtype, device=device)
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device)
        head = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            rows = size_for_rank("vocab_size", config.vocab_size, parallel.attn_tp)
            head = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=dtype, device=device))
        self.lm_head = LMHead(head, vocab_size=config.vocab_size, tp=parallel.attn_tp)
        self.rotary = RotaryEmbedding(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            device=device,
        )

    @property
    def crosses_dp_ranks(self) -> bool:
        return self.config.has_experts

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        kv_caches: Sequence[LayerKV],
        metadata: CausalMetadata,
        tap_layer_ids: tuple[int, ...],
        experts: ExpertMetadata,
    ) -> DecoderOutput:
        assert len(kv_caches) == len(self.layers), f"{len(kv_caches)} caches for {len(self.layers)} layers"
        phase = self.rotary(positions_N)
        residual_ND: Tensor = self.embed_tokens(token_ids_N)
        taps = {-1: residual_ND} if -1 in tap_layer_ids else {}
        for index, (layer, kv) in enumerate(zip(self.layers, kv_caches, strict=True)):
            residual_ND = layer(residual_ND, phase, backend=self.backend, kv=kv, metadata=metadata, experts=experts)
            if index in tap_layer_ids:
                taps[index] = residual_ND
        taps_NF = torch.cat([residual_ND[:, :0], *(taps[layer_id] for layer_id in tap_layer_ids)], dim=-1)
        return DecoderOutput(hidden_ND=self.norm(residual_ND), taps_NF=taps_NF)

    def compute_logits(self, hidden_KD: Tensor) -> Tensor:
        """fp32 [K, V]."""
        logits_KV: Tensor = self.lm_head(hidden_KD)
        return logits_KV

    def finite_rows(self, logits_KV: Tensor) -> tuple[bool, ...]:
        return tuple(logits_KV.sum(dim=-1).isfinite().tolist())
