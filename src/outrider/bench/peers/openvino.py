"""OpenVINO GenAI's continuous batching, driven step by step, with or without its prompt lookup."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outrider.bench.peers.protocol import Limits, Peer, Workload
from outrider.bench.served import Run, Served
from outrider.outputs import SpecCounters

_KV_BLOCK = 32
_LOOKUP_NGRAM = 3  # longest run of tokens searched for, as the library's own examples have it


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVino:
    module: ClassVar[str] = "openvino_genai"
    distributions: ClassVar[tuple[str, ...]] = ("openvino-genai", "openvino")
    path: str  # a GGUF file
    limits: Limits
    lookup_tokens: int  # 0: without prompt lookup

    def load(self) -> Peer:
        return LoadedOpenVino(self)


@dataclass(slots=True, eq=False)
class _Stream:
    index: int
    handle: Any
    began_s: float
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0


class LoadedOpenVino:
    def __init__(self, spec: OpenVino) -> None:
        import openvino_genai

        self._genai: Any = openvino_genai
        self._spec = spec
        limits = spec.limits
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = limits.max_streams
        blocks = -(-(limits.max_request_tokens + spec.lookup_tokens) // _KV_BLOCK) + 1
        scheduler.num_kv_blocks = limits.max_streams * blocks
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": limits.threads}
        if spec.lookup_tokens:
            properties["prompt_lookup"] = True
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(spec.path, scheduler, "CPU", properties)
        self._next_id = 0

    def generate(self, workload: Workload) -> Run:
        waiting = deque(enumerate(workload.prompts))
        active: list[_Stream] = []
        served: dict[int, Served] = {}
        began = time.perf_counter()
        while waiting or active:
            while waiting and len(active) < workload.streams:
                index, prompt = waiting.popleft()
                began_s = time.perf_counter() - began
                active.append(_Stream(index=index, handle=self._add(prompt, workload, index), began_s=began_s))
            self._pipeline.step()
            now_s = time.perf_counter() - began
            for stream in list(active):
                while stream.handle.can_read():
                    for output in stream.handle.read().values():
                        stream.token_ids += output.generated_ids
                if stream.token_ids and not stream.first_s:
                    stream.first_s = now_s
                if stream.handle.get_status() == self._genai.GenerationStatus.RUNNING:
                    continue
                active.remove(stream)
                served[stream.index] = Served(
                    num_tokens=len(stream.token_ids),
                    ttft_s=stream.first_s - stream.began_s,
                    e2e_s=now_s - stream.began_s,
                    token_ids=tuple(stream.token_ids),
                )
        elapsed_s = time.perf_counter() - began
        return Run(
            served=tuple(served[index] for index in range(len(workload.prompts))),
            elapsed_s=elapsed_s,
            spec=SpecCounters(),
        )

    def _add(self, prompt: tuple[int, ...], workload: Workload, index: int) -> Any:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = workload.max_tokens
        config.ignore_eos = True
        config.do_sample = workload.temperature > 0
        if config.do_sample:
            config.temperature = workload.temperature
            config.rng_seed = workload.seed + index
        if self._spec.lookup_tokens:
            config.num_assistant_tokens = self._spec.lookup_tokens
            config.max_ngram_size = _LOOKUP_NGRAM
        self._next_id += 1
        token_ids = openvino.Tensor(np.asarray([prompt], dtype=np.int64))  # [1, S]
        return self._pipeline.add_request(self._next_id, token_ids, config)
