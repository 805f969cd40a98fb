"""The engines that are compared: drafting as asked for, prompt lookup, and no drafting, over one target's weights.

They differ in the proposer alone: same weights, same kernels, same limits, and prompt lookup proposes as many tokens
as the drafter does. Weights of torch modules are loaded once; packed weights each engine maps from the cache, so they
are in memory once, too. With several ranks each engine is a group of processes. Prefix caching is off, or a repetition
would find its own prompts in the cache. The KV pools are as small as the workload allows, so that peak memory says
something although several engines are in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.workload import BenchRequest
from outrider.config import EngineArgs, EngineConfig, ProposerName, launcher_from_environment
from outrider.engine.engine import Engine
from outrider.engine.launch import make_engine, refuse_timeout
from outrider.engine.llm import OFFLINE_MAX_WAITING
from outrider.engine.quantization import load_shared_target
from outrider.engine.setup import build_engine, resolve
from outrider.errors import ConfigError
from outrider.models.source import LoadedModel
from outrider.models.tokenizer import Tokenizer

_LEAST_KV_TOKENS = 4096  # for the drafter's self-test


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    args: EngineArgs  # as asked for, prefix caching and the limit of the queue off
    config: EngineConfig  # what they resolve to
    target: LoadedModel | None  # None: every engine, or every rank of it, loads or maps its own
    tokenizer: Tokenizer

    @classmethod
    def load(cls, args: EngineArgs) -> Contenders:
        """Resolve first, so that what cannot run is refused before weights load."""
        unloaded = cls.resolved(args)
        target = None if args.world_size > 1 else load_shared_target(unloaded.config)
        return dataclasses.replace(unloaded, target=target)

    @classmethod
    def resolved(cls, args: EngineArgs) -> Contenders:
        """Without weights: every engine that is built loads its own."""
        args = dataclasses.replace(args, enable_prefix_caching=False, max_num_waiting=OFFLINE_MAX_WAITING)
        refuse_timeout(args)
        resolved = resolve(args.drafting_with(args.draft))
        if args.world_size > 1 and (args.nnodes > 1 or launcher_from_environment() is not None):
            raise ConfigError(f"nnodes={args.nnodes}: bench starts several engines, so its ranks are of one machine")
        return cls(args=args, config=resolved.config, target=None, tokenizer=resolved.model.load_tokenizer())

    @property
    def names(self) -> tuple[ProposerName, ...]:
        """What was asked for first; drafting off last."""
        return ("dspark", "lookup", "none") if self.config.proposer == "dspark" else ("lookup", "none")

    def build(self, name: ProposerName, *, num_kv_tokens: int) -> Engine:
        """A fresh engine with this proposer and room for ``num_kv_tokens`` tokens, unless the user set the memory."""
        args = self.args
        if name == self.config.proposer:
            args = args.drafting_with(args.draft)
        else:
            gamma = self.config.num_speculative_tokens or args.num_speculative_tokens
            args = dataclasses.replace(args.drafting_with(name), num_speculative_tokens=gamma)
        if args.kv_cache_memory_bytes is None:
            layout = resolve(args).layout
            needed_tokens = max(num_kv_tokens, args.max_model_len or _LEAST_KV_TOKENS)
            blocks = -(-needed_tokens // layout.kv_block_size)
            needed = blocks * layout.kv_block_size * layout.bytes_per_token
            args = dataclasses.replace(args, kv_cache_memory_bytes=min(needed, layout.total_bytes))
        return make_engine(args) if self.target is None else build_engine(args, target=self.target)

    def num_kv_tokens(self, requests: Sequence[BenchRequest], *, max_concurrency: int) -> int:
        """Room for as many of the longest requests as run together, with the window of a round behind each."""
        longest = max(len(request.token_ids) + (request.params.max_tokens or 0) for request in requests)
        return self.room(together=min(max_concurrency, self.args.max_num_seqs, len(requests)), longest=longest)

    def room(self, *, together: int, longest: int) -> int:
        """KV tokens of so many requests of ``longest`` tokens each."""
        block, window = self.config.kv_block_size, self.config.num_speculative_tokens + 1
        return together * (longest + window + block)
