"""A DSpark drafter and its greedy round, written densely from the formulas, to compare the project's code with.

No paging, no batching, no shared code: one sequence, all context recomputed every round, features and target logits
taken from transformers. Shape legend: P context length, G draft tokens, D hidden, F tapped width, V vocabulary,
H heads, E head dimension.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM


class ReferenceTarget:
    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.embedding_VD: Tensor = self.model.get_input_embeddings().weight.detach()
        self.head_VD: Tensor = self.model.get_output_embeddings().weight.detach()

    @torch.no_grad()
    def run(self, token_ids: Sequence[int], layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and features [T, F] of a whole sequence."""
        output = self.model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
        features = [output.hidden_states[i + 1][0] for i in layer_ids]
        return output.logits[0], torch.cat(features, dim=-1) if features else output.logits.new_empty(0)

    def generate(self, prompt: Sequence[int], length: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(length):
            token_ids.append(int(self.run(token_ids, ())[0][-1].argmax()))
        return token_ids[len(prompt) :]


class GreedyDrafter(Protocol):
    """What ``reference_loop`` asks of a drafter, the reference one or the project's."""

    @property
    def layer_ids(self) -> Sequence[int]: ...

    def propose(self, features_PF: Tensor, anchor: int) -> tuple[list[int], Tensor]: ...


@dataclass(frozen=True)
class ReferenceDrafter:
    config: Mapping[str, Any]  # DeepSpec config.json
    tensors: Mapping[str, Tensor]  # DeepSpec names
    embedding_VD: Tensor
    head_VD: Tensor

    @classmethod
    def load(cls, path: Path, target: ReferenceTarget) -> ReferenceDrafter:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "model.safetensors")
        return cls(config, tensors, target.embedding_VD, target.head_VD)

    @property
    def layer_ids(self) -> Sequence[int]:
        layer_ids: Sequence[int] = self.config["target_layer_ids"]
        return layer_ids

    def hidden(self, features_PF: Tensor, anchor: int) -> Tensor:
        """[G, D] of the block [anchor, mask * (G - 1)] at positions P .. P + G - 1, after the final norm."""
        config, weights = self.config, self.tensors
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        gamma, context = config["block_size"], features_PF.shape[0]
        context_PD = self._norm(features_PF @ weights["fc.weight"].T, "hidden_norm.weight")
        hidden_GD = self.embedding_VD[torch.tensor([anchor] + [config["mask_token_id"]] * (gamma - 1))]
        positions = torch.arange(context + gamma)
        for layer in range(config["num_hidden_layers"]):
            prefix = f"layers.{layer}."
            attention = prefix + "self_attn."
            normed_GD = self._norm(hidden_GD, prefix + "input_layernorm.weight")
            source = torch.cat((context_PD, normed_GD))
            query = self._norm(
                (normed_GD @ weights[attention + "q_proj.weight"].T).view(gamma, heads, size),
                attention + "q_norm.weight",
            )
            key = self._norm(
                (source @ weights[attention + "k_proj.weight"].T).view(-1, kv_heads, size),
                attention + "k_norm.weight",
            )
            value = (source @ weights[attention + "v_proj.weight"].T).view(-1, kv_heads, size)
            query = self._rotate(query, positions[context:])
            key = self._rotate(key, positions).repeat_interleave(heads // kv_heads, dim=1)
            value = value.repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("ghe,phe->hgp", query, key) / math.sqrt(size)
            mixed = torch.einsum("hgp,phe->ghe", scores.softmax(-1), value).reshape(gamma, heads * size)
            hidden_GD = hidden_GD + mixed @ weights[attention + "o_proj.weight"].T
            normed_GD = self._norm(hidden_GD, prefix + "post_attention_layernorm.weight")
            hidden_GD = hidden_GD + self._mlp(prefix + "mlp.", normed_GD)
        return self._norm(hidden_GD, "norm.weight")

    def _mlp(self, prefix: str, normed_GD: Tensor) -> Tensor:
        """SwiGLU, or where there is a router the weighted sum of those of each row's chosen experts."""
        weights = self.tensors
        if prefix + "gate.weight" not in weights:
            return self._swiglu(prefix, normed_GD)
        mixed_GD = torch.zeros_like(normed_GD)
        for row, x_D in enumerate(normed_GD):
            top = (weights[prefix + "gate.weight"] @ x_D).softmax(0).topk(self.config["num_experts_per_tok"])
            share = top.values / top.values.sum() if self.config["norm_topk_prob"] else top.values
            for expert, factor in zip(top.indices.tolist(), share, strict=True):
                mixed_GD[row] += factor * self._swiglu(f"{prefix}experts.{expert}.", x_D)
        return mixed_GD

    def _swiglu(self, prefix: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(x @ self.tensors[prefix + "gate_proj.weight"].T)
        up = x @ self.tensors[prefix + "up_proj.weight"].T
        return (gate * up) @ self.tensors[prefix + "down_proj.weight"].T

    def propose(self, features_PF: Tensor, anchor: int) -> tuple[list[int], Tensor]:
        """Greedy drafts and the logits [G, V] they were taken from (vanilla, gated or rnn Markov head)."""
        hidden_GD = self.hidden(features_PF, anchor)
        state = torch.zeros(self.config["markov_rank"])
        previous, drafts, rows = anchor, list[int](), list[Tensor]()
        for hidden_D in hidden_GD:
            logits_V = hidden_D @ self.head_VD.T
            if self.config["markov_rank"]:
                output_r, state = self._markov(hidden_D, self.tensors["markov_head.markov_w1.weight"][previous], state)
                logits_V = logits_V + self.tensors["markov_head.markov_w2.weight"] @ output_r
            previous = int(logits_V.argmax())
            drafts.append(previous)
            rows.append(logits_V)
        return drafts, torch.stack(rows)

    def _markov(self, hidden_D: Tensor, embedding_r: Tensor, state_r: Tensor) -> tuple[Tensor, Tensor]:
        head_type = self.config["markov_head_type"]
        if head_type == "vanilla":
            return embedding_r, state_r
        if head_type == "gated":
            gate = self._affine("gate_proj", torch.cat((hidden_D, embedding_r)))
            return torch.sigmoid(gate) * embedding_r, state_r
        gate, candidate, output = self._affine("joint_proj", torch.cat((state_r, embedding_r, hidden_D))).chunk(3)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state_r + (1 - gate) * torch.tanh(candidate)

    def _affine(self, name: str, inputs: Tensor) -> Tensor:
        return self.tensors[f"markov_head.{name}.weight"] @ inputs + self.tensors[f"markov_head.{name}.bias"]

    def _norm(self, inputs: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(inputs.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return inputs * scale * self.tensors[name]

    def _rotate(self, inputs_NHE: Tensor, positions_N: Tensor) -> Tensor:
        half = inputs_NHE.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (positions_N[:, None] * frequencies).float()[:, None]
        first, second = inputs_NHE[..., :half], inputs_NHE[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True)
class ReferenceRun:
    token_ids: list[int]  # emitted, first token (from prefill) included
    accepted: list[int]  # accepted drafts of each round

    @property
    def accepted_length(self) -> float:
        return (len(self.token_ids) - 1) / len(self.accepted)


def reference_loop(
    target: ReferenceTarget, drafter: GreedyDrafter, prompt: Sequence[int], *, max_tokens: int, gamma: int
) -> ReferenceRun:
    """Greedy speculative decoding of one request; ``gamma`` drafts of each block are verified."""
    sequence = [*prompt, int(target.run(prompt, ())[0][-1].argmax())]
    accepted: list[int] = []
    while len(sequence) - len(prompt) < max_tokens:
        _, features_PF = target.run(sequence[:-1], drafter.layer_ids)
        drafts = drafter.propose(features_PF, sequence[-1])[0][:gamma]
        logits_TV, _ = target.run(sequence + drafts, ())
        choices = logits_TV[len(sequence) - 1 :].argmax(-1).tolist()
        count = 0
        while count < len(drafts) and drafts[count] == choices[count]:
            count += 1
        room = max_tokens - (len(sequence) - len(prompt))
        sequence += [*drafts[:count], choices[count]][:room]
        accepted.append(count)
    return ReferenceRun(sequence[len(prompt) :], accepted)
