"""From what a user said to a running engine core: resolve and refuse first, load weights after.

``resolve`` reads configurations only. Everything that cannot run is refused there by name, so that nobody waits for
weights to learn of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from outrider.batch.tiers import capture_sizes
from outrider.config import DeviceName, DrafterConfig, DTypeName, EngineArgs, EngineConfig, ModelConfig, ProposerName
from outrider.engine.agreement import StepAgreement
from outrider.engine.capture import capture_tiers
from outrider.engine.devices import available_bytes, device_of_rank, ranks_of_machine, resolve_device
from outrider.engine.engine_core import EngineCore
from outrider.engine.quantization import (
    Drafter,
    Target,
    default_kv_dtype,
    ready_drafter,
    ready_target,
    required_kernels,
    resolve_quantization,
)
from outrider.engine.self_test import run_self_test
from outrider.errors import ConfigError
from outrider.kv_cache.manager import KVCacheManager
from outrider.layers.attention.interface import LayerKV
from outrider.layers.attention.registry import get_attention_backend
from outrider.layers.moe import ExpertLoad
from outrider.logger import get_logger
from outrider.models.describe import ModelDescription, describe_model
from outrider.models.drafter_checkpoint import (
    check_against_target,
    check_num_speculative_tokens,
    plan_directory,
    resolve_drafter,
)
from outrider.models.drafter_checkpoint_config import read_drafter_config
from outrider.models.source import LoadedModel
from outrider.parallel.state import ParallelState
from outrider.parallel.topology import Topology
from outrider.runner.batch_builder import BatchBuilder
from outrider.runner.cuda_graph_runner import CudaGraphRunner
from outrider.runner.graph_runner import EagerRunner, GraphRunner, StaticRunner
from outrider.runner.kv_memory import KVLayout, allocate_kv, kv_bytes_per_token, plan_kv_memory
from outrider.runner.model_runner import ModelRunner
from outrider.sampling.backend import SamplingBackend, TorchSampling
from outrider.sampling.compiled import CompiledSampling
from outrider.scheduler.scheduler import Scheduler, SchedulerConfig
from outrider.spec_decode.dspark_proposer import DSparkProposer
from outrider.spec_decode.proposer import NoProposer, PromptLookupProposer, Proposer

logger = get_logger(__name__)

DEFAULT_KV_CACHE_BYTES = 2 * 2**30
LOOKUP_NUM_SPECULATIVE_TOKENS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """Everything decided, nothing loaded."""

    config: EngineConfig
    model: ModelDescription
    drafters: tuple[DrafterConfig, ...]  # none, or the one the proposer uses
    layout: KVLayout
    topology: Topology


def resolve(args: EngineArgs) -> ResolvedEngine:
    """Decide every open question. Raises ConfigError or CheckpointError, naming what cannot run and why."""
    topology = topology_of(args)
    model = describe_model(args.model)
    topology.check_target(model.config)
    limit = model.config.max_position_embeddings
    wanted_len = args.max_model_len if args.max_model_len is not None else limit
    if wanted_len > limit:
        raise ConfigError(f"max_model_len={wanted_len} exceeds the model's max_position_embeddings={limit}")
    device = resolve_device(args)
    enforce_eager = _enforce_eager(args, device)
    get_attention_backend(args.attention_backend, device=device)
    if device == "cuda" and args.attention_backend == "reference" and not enforce_eager:
        raise ConfigError(
            "attention_backend='reference' reads lengths on the host, which no CUDA graph can record: it needs "
            "enforce_eager on device='cuda'"
        )
    quantization = resolve_quantization(args, model, device=device)
    dtype: DTypeName = model.dtype if args.dtype == "auto" else args.dtype
    path, drafters = _choose_drafter(args, model)
    for drafter in drafters:
        topology.check_drafter(drafter)
    proposer: ProposerName = "lookup" if args.draft == "lookup" else "dspark" if drafters else "none"
    shapes = (model.config, *(drafter.decoder for drafter in drafters))
    _require_a_use(args, has_experts=any(shape.has_experts for shape in shapes), proposer=proposer)
    if drafters:
        gamma = check_num_speculative_tokens(args.num_speculative_tokens, drafters[0])
    elif proposer == "lookup":
        gamma = args.num_speculative_tokens or LOOKUP_NUM_SPECULATIVE_TOKENS
    else:
        gamma = 0
    if args.draft_confidence_threshold > 0.0 and not (drafters and drafters[0].enable_confidence_head):
        raise ConfigError(
            f"draft_confidence_threshold={args.draft_confidence_threshold} needs a drafter with a confidence head; "
            f"draft={args.draft!r} has none"
        )
    kv_dtype, drafter_kv_dtype = (
        dtype if args.dtype != "auto" else default_kv_dtype(shape, dtype, quantization)
        for shape in (model.config, drafters[0].decoder if drafters else model.config)
    )
    target_bytes = kv_bytes_per_token(_kv_share(model.config, topology), kv_dtype)
    drafter_bytes = sum(kv_bytes_per_token(drafter.decoder, drafter_kv_dtype) for drafter in drafters)
    longest = -(-wanted_len // args.kv_block_size) * args.kv_block_size  # slots: whole blocks
    layout = plan_kv_memory(
        budget_bytes=_kv_budget(args, device, (target_bytes + drafter_bytes) * args.max_num_seqs * longest),
        kv_block_size=args.kv_block_size,
        target_bytes_per_token=target_bytes,
        drafter_bytes_per_token=drafter_bytes,
    )
    config = EngineConfig(
        model=args.model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        drafter_kv_dtype=drafter_kv_dtype,
        seed=args.seed,
        max_model_len=_fitting_len(args, wanted_len, layout),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_chunked_prefill=args.enable_chunked_prefill,
        enable_prefix_caching=args.enable_prefix_caching,
        kv_block_size=args.kv_block_size,
        num_kv_blocks=layout.num_blocks,
        max_num_waiting=args.max_num_waiting,
        proposer=proposer,
        drafter_path=path,
        num_speculative_tokens=gamma,
        draft_confidence_threshold=args.draft_confidence_threshold,
        speculative_disable_by_batch_size=args.speculative_disable_by_batch_size or 0,
        prompt_lookup_max=args.prompt_lookup_range[1],
        prompt_lookup_min=args.prompt_lookup_range[0],
        draft_self_test=args.draft_self_test,
        device=device,
        attention_backend=args.attention_backend,
        quantization=quantization,
        enforce_eager=enforce_eager,
        mask_padded_tokens=_mask_padded_tokens(args, topology),
    )
    _new_scheduler(config)  # its rules are checked before weights load, too
    return ResolvedEngine(config=config, model=model, drafters=drafters, layout=layout, topology=topology)


def _require_a_use(args: EngineArgs, *, has_experts: bool, proposer: ProposerName) -> None:
    """Refuse what would be accepted and then have no effect: the user means another model, or more ranks."""
    if args.all2all_backend == "alltoall" and args.world_size == 1:
        raise ConfigError(
            "all2all_backend='alltoall' sends rows between ranks; there is one rank only (data_parallel_size=1 * "
            "tensor_parallel_size=1)"
        )
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        if proposer != "lookup" and getattr(args, name) is not None:
            raise ConfigError(
                f"{name}={getattr(args, name)} is about prompt lookup; it needs draft='lookup', not {args.draft!r}"
            )
    limit = args.speculative_disable_by_batch_size
    if limit is not None and proposer == "none":
        raise ConfigError(
            f"speculative_disable_by_batch_size={limit} is about drafting; draft={args.draft!r} drafts nothing"
        )
    if limit is not None and limit >= args.max_num_seqs:
        raise ConfigError(
            f"speculative_disable_by_batch_size={limit} must be below max_num_seqs={args.max_num_seqs}: no more "
            "requests than that ever run"
        )
    if has_experts:
        return
    if args.enable_expert_parallel:
        raise ConfigError(
            "enable_expert_parallel spreads experts over ranks; neither the model nor its drafter has any"
        )
    if args.mask_padded_tokens != "auto":
        raise ConfigError(
            f"mask_padded_tokens={args.mask_padded_tokens!r} is about the rows that experts get; neither the model nor "
            "its drafter has experts"
        )


def topology_of(args: EngineArgs) -> Topology:
    return Topology(
        data_parallel_size=args.data_parallel_size,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_expert_parallel=args.enable_expert_parallel,
        all2all_backend=args.all2all_backend,
    )


def build_engine(
    args: EngineArgs, *, target: LoadedModel | None = None, parallel: ParallelState | None = None
) -> EngineCore:
    """One rank's engine: resolve, load and assemble; then hold the drafter against the figure stored beside it.

    ``target`` is the model that ``args`` name, where it is in memory already: engines may share one. ``parallel``: the
    groups this rank is in, None with one rank; all ranks call this together, and with the same ``args``.
    """
    resolved = resolve(args)
    if parallel is None:
        parallel = ParallelState.single(resolved.topology)
    assert resolved.topology == parallel.topology, (resolved.topology, parallel.topology)
    config = resolved.config
    device = device_of_rank(args, config.device, parallel.rank)
    ready = ready_target(resolved.model, config, loaded=target, parallel=parallel, device=device)
    model = resolved.model.config
    builder = BatchBuilder(
        rank=parallel.attn_dp.rank,
        kv_block_size=config.kv_block_size,
        max_model_len=config.max_model_len,
        mask_padded_tokens=config.mask_padded_tokens,
        pin_memory=device.type == "cuda",
    )
    graphs = _new_graph_runner(config, device)
    sampling: SamplingBackend = (
        TorchSampling() if config.quantization == "none" else CompiledSampling(required_kernels())
    )
    logger.info(resolved.layout.describe())
    keeps_packed = target is None  # weights that somebody changed in memory are not those of the files
    proposer, drafters = _build_proposer(
        resolved, ready, builder, graphs, sampling, device, parallel, keeps_packed=keeps_packed
    )
    runner = ModelRunner(
        target=ready.model,
        kv_caches=allocate_kv(
            _kv_share(model, resolved.topology), resolved.layout, dtype=config.kv_dtype, device=device
        ),
        tap_layer_ids=proposer.tap_layer_ids,
        graphs=graphs,
    )
    capture_tiers(
        graphs=graphs,
        runner=runner,
        proposer=proposer,
        builder=builder,
        num_dp_ranks=parallel.attn_dp.size,
        max_num_seqs=config.max_num_seqs,
        show_progress=parallel.rank == 0,
    )

    models: dict[str, nn.Module] = {"target": ready.model}
    models.update(("drafter", drafter.model) for drafter in drafters)

    def new_core() -> EngineCore:
        return EngineCore(
            config=config,
            scheduler=_new_scheduler(config),
            builder=builder,
            runner=runner,
            proposer=proposer,
            graphs=graphs,
            sampling=sampling,
            agreement=StepAgreement(parallel.attn_dp),
            expert_load=ExpertLoad(models),
            tokenizer=ready.tokenizer,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )

    if config.draft_self_test:
        for drafter in drafters:
            run_self_test(new_core(), drafter.card, num_speculative_tokens=drafter.config.num_speculative_tokens)
    return new_core()


def _choose_drafter(args: EngineArgs, model: ModelDescription) -> tuple[str, tuple[DrafterConfig, ...]]:
    """Path and configuration of the drafter, if there is one."""
    if args.draft in ("none", "lookup"):
        return "", ()
    path = resolve_drafter(args.draft, args.model)
    if path is None:
        logger.info("no drafter is bundled for %s: decoding without drafts", args.model)
        return "", ()
    config = read_drafter_config(path)
    check_against_target(config, model.config, source=str(path))
    plan_directory(path, config, target_vocab_size=model.config.vocab_size).raise_problems(str(path))
    return str(path), (config,)


def _build_proposer(
    resolved: ResolvedEngine,
    target: Target,
    builder: BatchBuilder,
    graphs: GraphRunner,
    sampling: SamplingBackend,
    device: torch.device,
    parallel: ParallelState,
    *,
    keeps_packed: bool,
) -> tuple[Proposer, tuple[Drafter, ...]]:
    """And the drafter it uses, if it uses one."""
    config = resolved.config
    if config.proposer == "none":
        return NoProposer(), ()
    if config.proposer == "lookup":
        lookup = PromptLookupProposer(
            num_speculative_tokens=config.num_speculative_tokens,
            max_ngram=config.prompt_lookup_max,
            min_ngram=config.prompt_lookup_min,
        )
        return lookup, ()
    (own,) = resolved.drafters
    drafter = ready_drafter(
        own,
        config,
        target=target.model,
        target_path=resolved.model.path if keeps_packed else None,
        parallel=parallel,
        device=device,
    )
    kv_caches: list[LayerKV] = allocate_kv(
        drafter.config.decoder, resolved.layout, dtype=config.drafter_kv_dtype, device=device
    )
    proposer = DSparkProposer(
        drafter=drafter.model,
        config=drafter.config,
        num_speculative_tokens=config.num_speculative_tokens,
        kv_caches=kv_caches,
        builder=builder,
        graphs=graphs,
        sampling=sampling,
    )
    return proposer, (drafter,)


def _enforce_eager(args: EngineArgs, device: DeviceName) -> bool:
    """Asked for, or: captured on accelerators, eager on a CPU, where tiers only pad."""
    return device == "cpu" if args.enforce_eager is None else args.enforce_eager


def _new_graph_runner(config: EngineConfig, device: torch.device) -> GraphRunner:
    if config.enforce_eager:
        return EagerRunner(device)
    tiers = capture_sizes(config.max_num_seqs)
    return CudaGraphRunner(tiers, device=device) if device.type == "cuda" else StaticRunner(tiers)


def _mask_padded_tokens(args: EngineArgs, topology: Topology) -> bool:
    """Asked for, or: where expert parallelism spans ranks, so that padding is neither sent nor counted."""
    if args.mask_padded_tokens == "auto":
        return topology.enable_expert_parallel and topology.world_size > 1
    return args.mask_padded_tokens == "on"


def _new_scheduler(config: EngineConfig) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            max_model_len=config.max_model_len,
            max_waiting=config.max_num_waiting,
            speculative_disable_by_batch_size=config.speculative_disable_by_batch_size,
        ),
        KVCacheManager(
            num_blocks=config.num_kv_blocks,
            kv_block_size=config.kv_block_size,
            enable_prefix_caching=config.enable_prefix_caching,
        ),
        num_speculative_tokens=config.num_speculative_tokens,
    )


def _kv_share(config: ModelConfig, topology: Topology) -> ModelConfig:
    """The target's shape with the heads that one rank keeps keys and values of."""
    size = topology.tensor_parallel_size
    return dataclasses.replace(config, num_heads=config.num_heads // size, num_kv_heads=config.num_kv_heads // size)


def _fitting_len(args: EngineArgs, wanted_len: int, layout: KVLayout) -> int:
    """The context limit, within what the KV memory holds for one request alone."""
    capacity = layout.num_blocks * layout.kv_block_size
    if wanted_len <= capacity:
        return wanted_len
    if args.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={wanted_len} exceeds the {capacity} tokens that the KV memory holds "
            f"({layout.describe()}); lower it or raise kv_cache_memory_bytes"
        )
    logger.info("max_model_len is %d, what the KV memory holds, and not the model's %d", capacity, wanted_len)
    return capacity


def _kv_budget(args: EngineArgs, device: DeviceName, largest_need: int) -> int:
    """Bytes for one rank: asked for, or 2 GiB, but at most twice its need and its share of half of what is free."""
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes
    available = available_bytes(device, num_ranks=ranks_of_machine(args))
    return max(min(DEFAULT_KV_CACHE_BYTES, available // 2, 2 * largest_need), 1)
