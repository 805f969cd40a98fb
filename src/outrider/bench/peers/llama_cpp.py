"""llama.cpp through the C interface that llama-cpp-python ships, and that package's own prompt lookup.

Plain decoding drives the C interface, because the package's class serves one request at a time and copies logits: a
prompt at a time, then one batch a token over all sequences, each with a sampler of llama.cpp's own.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, ClassVar

from outrider.bench.peers.protocol import CannotRunError, Limits, Peer, Workload
from outrider.bench.served import Run, Served
from outrider.outputs import SpecCounters

_BATCH_TOKENS = 2048
_CONTEXT_UNIT = 256  # contexts are a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCpp:
    module: ClassVar[str] = "llama_cpp"
    distributions: ClassVar[tuple[str, ...]] = ("llama-cpp-python",)
    path: str  # a GGUF file
    limits: Limits
    lookup_tokens: int  # 0: without prompt lookup

    def load(self) -> Peer:
        return LoadedLlamaCppLookup(self) if self.lookup_tokens else LoadedLlamaCpp(self)


@dataclass(slots=True, eq=False)
class _Stream:
    """A request that decodes; its last token has not been run yet."""

    index: int
    sampler: Any
    position: int  # of the last token
    began_s: float
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0


class LoadedLlamaCpp:
    def __init__(self, spec: LlamaCpp) -> None:
        import llama_cpp

        self._c = llama_cpp
        self._spec = spec
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # to be kept alive
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(spec.path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {spec.path}")
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._contexts: dict[int, Any] = {}  # by the number of streams

    def generate(self, workload: Workload) -> Run:
        context = self._context(workload.streams)
        waiting = deque(enumerate(workload.prompts))
        free = list(range(workload.streams))  # a heap: the lowest is taken
        active: dict[int, _Stream] = {}  # by sequence
        served: dict[int, Served] = {}
        began = time.perf_counter()
        while waiting or active:
            while waiting and free:
                index, prompt = waiting.popleft()
                sequence = heappop(free)
                active[sequence] = self._start(context, sequence, index, prompt, workload, began)
            for sequence, stream in list(active.items()):
                if len(stream.token_ids) == workload.max_tokens:
                    served[stream.index] = _served(stream, time.perf_counter() - began)
                    self._c.llama_sampler_free(stream.sampler)
                    self._c.llama_memory_seq_rm(self._c.llama_get_memory(context), sequence, -1, -1)
                    del active[sequence]
                    heappush(free, sequence)
            # In ascending order: of others llama.cpp runs each sequence in a pass of its own.
            active = dict(sorted(active.items()))
            if active and not (free and waiting):
                self._decode(context, [(s.token_ids[-1], s.position, sequence, True) for sequence, s in active.items()])
                for row, stream in enumerate(active.values()):
                    stream.token_ids.append(self._c.llama_sampler_sample(stream.sampler, context, row))
                    stream.position += 1
        elapsed_s = time.perf_counter() - began
        return Run(
            served=tuple(served[index] for index in range(len(workload.prompts))),
            elapsed_s=elapsed_s,
            spec=SpecCounters(),
        )

    def _start(
        self, context: Any, sequence: int, index: int, prompt: tuple[int, ...], workload: Workload, began: float
    ) -> _Stream:
        """Run a prompt and sample its first token."""
        began_s = time.perf_counter() - began
        sampler = self._sampler(workload.temperature, workload.seed + index)
        last = len(prompt) - 1
        row = 0
        for start in range(0, len(prompt), _BATCH_TOKENS):
            part = prompt[start : start + _BATCH_TOKENS]
            self._decode(context, [(token, start + i, sequence, start + i == last) for i, token in enumerate(part)])
            row = len(part) - 1
        stream = _Stream(index=index, sampler=sampler, position=last + 1, began_s=began_s)
        stream.token_ids.append(self._c.llama_sampler_sample(sampler, context, row))
        stream.first_s = time.perf_counter() - began
        return stream

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """``rows``: token, position, sequence, and whether its logits are wanted."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = self._c.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens answered {status}")

    def _context(self, streams: int) -> Any:
        if streams not in self._contexts:
            params = self._c.llama_context_default_params()
            params.n_ctx = streams * _padded(self._spec.limits.max_request_tokens)
            params.n_seq_max = streams
            params.n_batch = _BATCH_TOKENS
            params.n_threads = params.n_threads_batch = self._spec.limits.threads
            context = self._c.llama_init_from_model(self._model, params)
            if not context:
                raise CannotRunError(f"llama.cpp makes no context of {streams} sequences")
            self._contexts[streams] = context
        return self._contexts[streams]

    def _sampler(self, temperature: float, seed: int) -> Any:
        chain = self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params())
        if temperature == 0:
            self._c.llama_sampler_chain_add(chain, self._c.llama_sampler_init_greedy())
        else:
            self._c.llama_sampler_chain_add(chain, self._c.llama_sampler_init_temp(temperature))
            self._c.llama_sampler_chain_add(chain, self._c.llama_sampler_init_dist(seed % 2**32))
        return chain


class LoadedLlamaCppLookup:
    def __init__(self, spec: LlamaCpp) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._llama = Llama(
            spec.path,
            n_ctx=_padded(spec.limits.max_request_tokens + spec.lookup_tokens),
            n_threads=spec.limits.threads,
            n_threads_batch=spec.limits.threads,
            logits_all=True,  # drafts need the logits of every row
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=spec.lookup_tokens),
            verbose=False,
        )

    def generate(self, workload: Workload) -> Run:
        if workload.streams != 1:
            raise CannotRunError("its prompt lookup serves one stream")
        began = time.perf_counter()
        served = []
        for index, prompt in enumerate(workload.prompts):
            started = time.perf_counter()
            self._llama.reset()
            self._llama.set_seed((workload.seed + index) % 2**32)
            tokens = self._llama.generate(
                list(prompt), temp=workload.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
            )
            token_ids = [next(tokens)]
            first = time.perf_counter()
            while len(token_ids) < workload.max_tokens:
                token_ids.append(next(tokens))
            ended = time.perf_counter()
            tokens.close()
            served.append(
                Served(
                    num_tokens=len(token_ids),
                    ttft_s=first - started,
                    e2e_s=ended - started,
                    token_ids=tuple(token_ids),
                )
            )
        return Run(served=tuple(served), elapsed_s=time.perf_counter() - began, spec=SpecCounters())


def _served(stream: _Stream, now_s: float) -> Served:
    return Served(
        num_tokens=len(stream.token_ids),
        ttft_s=stream.first_s - stream.began_s,
        e2e_s=now_s - stream.began_s,
        token_ids=tuple(stream.token_ids),
    )


def _padded(tokens: int) -> int:
    return -(-tokens // _CONTEXT_UNIT) * _CONTEXT_UNIT
