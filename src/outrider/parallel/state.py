"""The groups this process is in. Frozen; a module receives only the communicator of the group it uses."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.parallel.communicator import Communicator, SingleRankCommunicator
from outrider.parallel.topology import Topology

ONE_RANK = Topology.single()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelState:
    topology: Topology
    rank: int  # in the world
    world: Communicator  # all ranks: experts are spread over these
    attn_tp: Communicator  # ranks with the same requests: they share heads, MLP columns and the LM head
    attn_dp: Communicator  # one rank per data-parallel rank: the step agreement, index = dp_rank

    def __post_init__(self) -> None:
        topology = self.topology
        for name, ranks in (
            ("world", tuple(range(topology.world_size))),
            ("attn_tp", topology.attn_tp_ranks(self.rank)),
            ("attn_dp", topology.attn_dp_ranks(self.rank)),
        ):
            group: Communicator = getattr(self, name)
            assert (group.size, group.rank) == (len(ranks), ranks.index(self.rank)), f"{name} is not {ranks}"

    @classmethod
    def single(cls, topology: Topology = ONE_RANK) -> ParallelState:
        """A rank alone; ``topology`` must be of one."""
        alone = SingleRankCommunicator()
        return cls(topology=topology, rank=0, world=alone, attn_tp=alone, attn_dp=alone)


SINGLE_RANK = ParallelState.single()  # for callers without ranks; it holds nothing that could change
