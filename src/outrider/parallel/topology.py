"""Who shares what with whom: pure arithmetic over rank numbers, tested without processes.

Ranks are numbered dp-major: rank = dp_rank * tensor_parallel_size + tp_rank. Attention runs data-parallel over
``attn_dp`` (ranks of one tp_rank, each with its own requests) and tensor-parallel over ``attn_tp`` (ranks of one
dp_rank, all with the same requests). The LM head is sharded over ``attn_tp`` only, so no logits cross data-parallel
ranks. Experts are spread over the whole world: whole experts with expert parallelism, slices of every expert without
(the meaning of vLLM's flags).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import All2AllBackend, DrafterConfig, ModelConfig
from outrider.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    data_parallel_size: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    all2all_backend: All2AllBackend = "allgather_reducescatter"  # how rows reach experts on other ranks

    def __post_init__(self) -> None:
        if self.all2all_backend == "alltoall" and not self.enable_expert_parallel:
            raise ConfigError(
                "all2all_backend='alltoall' needs enable_expert_parallel: it sends rows to the ranks that hold whole "
                "experts, and without expert parallelism every rank holds a slice of all"
            )
        for name in ("data_parallel_size", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @classmethod
    def single(cls) -> Topology:
        return cls(data_parallel_size=1, tensor_parallel_size=1, enable_expert_parallel=False)

    @property
    def world_size(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    def dp_rank(self, rank: int) -> int:
        return self._checked(rank) // self.tensor_parallel_size

    def tp_rank(self, rank: int) -> int:
        return self._checked(rank) % self.tensor_parallel_size

    def is_leader(self, rank: int) -> bool:
        """The rank of its attention-TP group that talks to the front process."""
        return self.tp_rank(rank) == 0

    def attn_tp_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same requests as ``rank``, itself included, ascending."""
        first = self.dp_rank(rank) * self.tensor_parallel_size
        return tuple(range(first, first + self.tensor_parallel_size))

    def attn_dp_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks of the same tp_rank, one per data-parallel rank, ascending: index = dp_rank."""
        return tuple(range(self.tp_rank(rank), self.world_size, self.tensor_parallel_size))

    def check_target(self, config: ModelConfig) -> None:
        """Refuse, by name, every shape of the target that these ranks do not divide."""
        all_sparse = config.moe is not None and all(config.moe.sparse_layers)
        dense = () if all_sparse else ("intermediate_size",)
        for name in ("num_heads", "num_kv_heads", *dense, "vocab_size"):
            _require_divides("tensor_parallel_size", self.tensor_parallel_size, name, getattr(config, name))
        self._check_experts(config, "the target")

    def check_drafter(self, config: DrafterConfig) -> None:
        """A drafter's attention and head are whole on every rank; only experts in its layers are spread."""
        self._check_experts(config.decoder, "the drafter")

    def _check_experts(self, config: ModelConfig, whose: str) -> None:
        if config.moe is None:
            return
        if self.enable_expert_parallel:
            if config.moe.num_experts % self.world_size:
                raise ConfigError(
                    f"enable_expert_parallel: num_experts={config.moe.num_experts} of {whose} does not divide by the "
                    f"{self.world_size} ranks (data_parallel_size * tensor_parallel_size)"
                )
        elif config.moe.moe_intermediate_size % self.world_size:
            raise ConfigError(
                f"moe_intermediate_size={config.moe.moe_intermediate_size} of {whose} does not divide by the "
                f"{self.world_size} ranks (data_parallel_size * tensor_parallel_size); without enable_expert_parallel "
                "every expert is sliced over all ranks"
            )

    def _checked(self, rank: int) -> int:
        assert 0 <= rank < self.world_size, f"rank {rank} is outside 0..{self.world_size - 1}"
        return rank


def _require_divides(size_name: str, size: int, name: str, value: int) -> None:
    if value % size:
        raise ConfigError(f"{size_name}={size} does not divide the model's {name}={value}")
