"""Hugging Face transformers' ``generate`` in bfloat16: static batches of as many requests as there are streams."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.bench.peers.protocol import CannotRunError, Limits, Peer, Workload
from outrider.bench.served import Run, Served
from outrider.outputs import SpecCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformers:
    module: ClassVar[str] = "transformers"
    distributions: ClassVar[tuple[str, ...]] = ("transformers", "torch")
    path: str  # a GGUF file or an HF directory
    limits: Limits
    lookup_tokens: int  # 0: without prompt lookup

    def load(self) -> Peer:
        return LoadedTransformers(self)


class LoadedTransformers:
    def __init__(self, spec: Transformers) -> None:
        from pathlib import Path

        import torch
        import transformers

        torch.set_num_threads(spec.limits.threads)
        path = Path(spec.path)
        place = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            place[0], dtype=torch.bfloat16, local_files_only=True, **place[1]
        ).eval()
        config = self._model.generation_config
        self._pad_id = config.pad_token_id if config.pad_token_id is not None else 0
        config.eos_token_id = None  # nothing ends an answer but its length
        self._lookup_tokens = spec.lookup_tokens

    def generate(self, workload: Workload) -> Run:
        if self._lookup_tokens and workload.streams != 1:
            raise CannotRunError("its prompt lookup serves one stream")
        began = time.perf_counter()
        served: list[Served] = []
        for start in range(0, len(workload.prompts), workload.streams):
            served += self._batch(workload, start)
        return Run(served=tuple(served), elapsed_s=time.perf_counter() - began, spec=SpecCounters())

    def _batch(self, workload: Workload, start: int) -> list[Served]:
        import torch

        prompts = workload.prompts[start : start + workload.streams]
        width = max(map(len, prompts))
        input_ids = torch.tensor([[self._pad_id] * (width - len(p)) + list(p) for p in prompts])  # [B, S]
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])  # [B, S]
        torch.manual_seed(workload.seed + start)
        sampling: dict[str, Any] = {"do_sample": False}
        if workload.temperature > 0:
            sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0, "top_p": 1.0}
        if self._lookup_tokens:
            sampling["prompt_lookup_num_tokens"] = self._lookup_tokens
        clock = _FirstToken()
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                max_new_tokens=workload.max_tokens,
                pad_token_id=self._pad_id,
                streamer=clock,
                **sampling,
            )
        e2e_s = time.perf_counter() - began
        answers = output[:, width:].tolist()
        return [
            Served(num_tokens=len(ids), ttft_s=clock.first - began, e2e_s=e2e_s, token_ids=tuple(ids))
            for ids in answers
        ]


class _FirstToken:
    """A streamer in the library's sense: it is handed the prompt, then every token."""

    def __init__(self) -> None:
        self.first = 0.0
        self._calls = 0

    def put(self, value: object) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass
