"""Configuration: what the user may leave open (EngineArgs) and what the engine runs on (EngineConfig, nothing open).

``EngineArgs`` is the only place with Optional fields; the flags of every command are its fields, spelled as vLLM
spells them. It resolves once, before weights load, to a frozen ``EngineConfig``.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from outrider.errors import ConfigError

DTypeName = Literal["float32", "bfloat16"]
DeviceName = Literal["cpu", "cuda"]
QuantizationName = Literal["none", "int8", "int4"]
QuantizationOption = Literal["auto", "none", "int8", "int4"]
ProposerName = Literal["none", "lookup", "dspark"]
All2AllBackend = Literal["allgather_reducescatter", "alltoall"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding as HF describes it (``rope_parameters``/``rope_scaling``), half-split style."""

    theta: float
    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0: derived from factor as HF does
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Expert layers of a decoder: softmax router, top-k, SwiGLU experts."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool  # weights of the chosen experts are divided by their sum
    sparse_layers: tuple[bool, ...]  # per layer: experts, or the dense MLP of ``intermediate_size``

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model config: {name}={getattr(self, name)} must be at least 1")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"model config: num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's shape. Made by ``models.model_config`` from HF or GGUF; nothing else reads foreign configs."""

    architecture: str  # e.g. "LlamaForCausalLM"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # q/k/v projections have biases
    attention_output_bias: bool  # o_proj has one
    mlp_bias: bool
    qk_norm: bool  # per-head RMSNorm on q and k before rotary (Qwen3)
    max_position_embeddings: int
    bos_token_id: int  # -1: none
    eos_token_ids: tuple[int, ...]
    moe: MoEConfig | None = None  # None: every layer is dense

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts, so that a pass crosses data-parallel ranks."""
        return self.moe is not None and any(self.moe.sparse_layers)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
                     "vocab_size", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"model config: {name}={value} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model config: head_dim={self.head_dim} must be even for rotary embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A DSpark drafter, whatever format its checkpoint had. The checkpoint is the only source of these numbers."""

    source_format: Literal["deepspec", "speculators", "specforge"]
    decoder: ModelConfig  # shape of the draft layers; vocab_size is the target's
    num_speculative_tokens: int  # gamma: tokens proposed per request and round
    sample_from_anchor: bool  # True: slot k predicts token p+1+k; False: block [anchor, gamma masks], slot 0 unused
    target_layer_ids: tuple[int, ...]  # i: output of target layer i (HF hidden_states[i + 1]); -1: embedding output
    num_target_layers: int  # 0: the checkpoint does not say
    mask_token_id: int
    markov_rank: int
    markov_head_type: MarkovHeadType
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    draft_vocab_size: int  # rows of the draft's lm_head and markov_w2; equals decoder.vocab_size without d2t

    @property
    def block_width(self) -> int:
        """Rows of the draft pass per request."""
        return self.num_speculative_tokens + (0 if self.sample_from_anchor else 1)

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"drafter: num_speculative_tokens={self.num_speculative_tokens} must be at least 1")
        if self.markov_rank < 0:
            raise ConfigError(f"drafter: markov_rank={self.markov_rank} must not be negative")
        if self.markov_rank == 0 and self.enable_confidence_head and self.confidence_head_with_markov:
            raise ConfigError("drafter: markov_rank=0 with confidence_head_with_markov=true; the head has no embedding")
        if not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ConfigError(
                f"drafter: mask_token_id={self.mask_token_id} must lie in 0..{self.decoder.vocab_size - 1} (vocab_size)"
            )
        if not self.target_layer_ids:
            raise ConfigError("drafter: target_layer_ids is empty; at least one target layer must be tapped")
        if self.draft_vocab_size > self.decoder.vocab_size:
            raise ConfigError(
                f"drafter: draft_vocab_size={self.draft_vocab_size} exceeds vocab_size={self.decoder.vocab_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What a user may say. The only place with optional fields; every command's engine flags are these fields."""

    model: str = "smollm2-135m"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    kv_block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    max_num_waiting: int = 1024
    draft: str = "auto"
    num_speculative_tokens: int | None = None
    draft_confidence_threshold: float = 0.0
    speculative_disable_by_batch_size: int | None = None  # None: drafting at any load
    prompt_lookup_max: int | None = None  # None: 3
    prompt_lookup_min: int | None = None  # None: 1
    draft_self_test: bool = True
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    attention_backend: str = "auto"
    quantization: QuantizationOption = "auto"
    enforce_eager: bool | None = None
    mask_padded_tokens: Literal["auto", "on", "off"] = "auto"
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: All2AllBackend = "allgather_reducescatter"
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None  # None: with one node any free port, with several 29501
    distributed_timeout_seconds: int | None = None  # None: 300

    def __post_init__(self) -> None:
        """Rules that need no checkpoint; the rest is checked by ``engine.setup`` before weights load."""
        _require_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _require_choice("device", self.device, ("auto", "cpu", "cuda"))
        _require_choice("quantization", self.quantization, get_args(QuantizationOption))
        _require_choice("mask_padded_tokens", self.mask_padded_tokens, ("auto", "on", "off"))
        _require_choice("all2all_backend", self.all2all_backend, ("allgather_reducescatter", "alltoall"))
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_block_size", "max_num_waiting",
                     "data_parallel_size", "tensor_parallel_size", "nnodes"):  # fmt: skip
            _require_at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_speculative_tokens",
                     "speculative_disable_by_batch_size", "prompt_lookup_max", "prompt_lookup_min",
                     "distributed_timeout_seconds"):  # fmt: skip
            if getattr(self, name) is not None:
                _require_at_least(name, getattr(self, name), 1)
        _require_at_least("seed", self.seed, 0)
        least, most = self.prompt_lookup_range
        if least > most:
            raise ConfigError(f"prompt_lookup_min={least} must not exceed prompt_lookup_max={most}")
        if not 0.0 <= self.draft_confidence_threshold <= 1.0:
            raise ConfigError(f"draft_confidence_threshold={self.draft_confidence_threshold} must lie in 0..1")
        self._check_nodes()

    @property
    def world_size(self) -> int:
        """Ranks, each a process where there are several."""
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def prompt_lookup_range(self) -> tuple[int, int]:
        """Shortest and longest run of tokens that prompt lookup searches for."""
        return self.prompt_lookup_min or 1, self.prompt_lookup_max or 3

    @property
    def collective_timeout_seconds(self) -> int:
        """How long the processes of an engine wait for one another."""
        return self.distributed_timeout_seconds or 300

    def drafting_with(self, draft: str) -> EngineArgs:
        """One engine of a comparison between proposers: what its own has no use for is left open."""
        args = self
        if draft != self.draft:
            args = dataclasses.replace(
                args,
                draft=draft,
                num_speculative_tokens=None,
                draft_confidence_threshold=0.0,
                speculative_disable_by_batch_size=None,
            )
        return args if draft == "lookup" else dataclasses.replace(args, prompt_lookup_max=None, prompt_lookup_min=None)

    def _check_nodes(self) -> None:
        if self.world_size % self.nnodes:
            raise ConfigError(
                f"nnodes={self.nnodes} does not divide the {self.world_size} ranks (data_parallel_size="
                f"{self.data_parallel_size} * tensor_parallel_size={self.tensor_parallel_size})"
            )
        if isinstance(self.node_rank, bool) or not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"node_rank={self.node_rank} must lie in 0..{self.nnodes - 1} (nnodes={self.nnodes})")
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise ConfigError(f"master_port={self.master_port} must lie in 1..65535")
        if self.nnodes == 1 and self.master_addr != "127.0.0.1":
            raise ConfigError(f"master_addr={self.master_addr!r} is where several nodes meet; nnodes=1")
        if self.world_size == 1 and self.master_port is not None:
            raise ConfigError(f"master_port={self.master_port} is where ranks meet; there is one rank only")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs on: every question answered, nothing optional."""

    model: str
    dtype: DTypeName
    kv_dtype: DTypeName
    drafter_kv_dtype: DTypeName
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    kv_block_size: int
    num_kv_blocks: int
    max_num_waiting: int
    proposer: ProposerName
    drafter_path: str  # "" without a drafter
    num_speculative_tokens: int  # 0 without a proposer
    draft_confidence_threshold: float
    speculative_disable_by_batch_size: int  # 0: drafting at any load
    prompt_lookup_max: int
    prompt_lookup_min: int
    draft_self_test: bool
    device: DeviceName
    attention_backend: str
    quantization: QuantizationName
    enforce_eager: bool  # True: no tiers are captured
    mask_padded_tokens: bool  # padding rows go to no expert


def _require_at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What a launcher of processes, such as torchrun, says to each of them."""

    rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    hosts_store: bool  # the launcher's own rendezvous store listens there; else rank 0 is to host one


def launcher_from_environment() -> Launcher | None:
    """The launcher that started this process, if one did: torchrun's variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    try:
        rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_PORT must be integers: {error}") from None
    return Launcher(
        rank=rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=port,
        hosts_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def rank_environment(*, num_threads: int) -> dict[str, str]:
    """The environment of a rank's process: this one's, its import path, and its share of the cores.

    The rendezvous store is the starter's, so that no rank hosts one: torch learns that as under torchrun.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def cache_dir() -> Path:
    """Where fetched models are kept: ``OUTRIDER_CACHE``, else ``~/.cache/outrider``."""
    return Path(os.environ.get("OUTRIDER_CACHE") or Path.home() / ".cache" / "outrider")
