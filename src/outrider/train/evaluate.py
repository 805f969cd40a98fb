"""Closed-loop acceptance, measured by a plain loop that shares nothing with the engine but the two models.

Contract: requests of one batch decode in lockstep, each until an end token or ``max_tokens``. Draft tokens are sampled
from the drafter's own distribution at the request's temperature (the most likely one at temperature 0), accepted with
probability min(1, p / q) from left to right, and the first rejection is replaced by a draw from max(p - q, 0); no
top-p, no top-k. Accepted length = tokens emitted by rounds / rounds; the token that prefill samples belongs to none,
and a round that emits an end token counts up to that token.

Invariant before each round: target cache and draft context both cover exactly the positions below the anchor.

Shape legend: R requests of the batch, N rows, G = gamma slots, W = G + 1 verify width, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.layers.attention.interface import BlockMetadata, CausalMetadata, LayerKV
from outrider.models.decoder import Decoder
from outrider.models.dspark import DSparkDrafter


@dataclass(slots=True)
class ClosedLoop:
    """Running totals, and the tokens of every request in the order of the prompts."""

    rounds: int = 0
    emitted: int = 0
    accepted: list[int] = field(default_factory=list)  # rounds by number of accepted drafts, 0..gamma
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def accepted_length(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0


@torch.inference_mode()
def closed_loop(
    target: Decoder,
    drafter: DSparkDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    batch: int = 16,
) -> ClosedLoop:
    """Decode ``prompts`` (token ids) ``batch`` at a time and count."""
    generator = torch.Generator().manual_seed(seed)
    totals = ClosedLoop(accepted=[0] * (drafter.config.num_speculative_tokens + 1))
    for start in range(0, len(prompts), batch):
        run = _Batch(
            target,
            drafter,
            prompts[start : start + batch],
            temperature=temperature,
            max_tokens=max_tokens,
            stop_ids=frozenset(stop_ids),
            generator=generator,
        )
        run.prefill()
        while run.active:
            run.round(totals)
        totals.outputs += run.outputs
    return totals


class _Batch:
    """Requests that decode together; request r owns cache slots r * L .. r * L + L."""

    def __init__(
        self,
        target: Decoder,
        drafter: DSparkDrafter,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        max_tokens: int,
        stop_ids: frozenset[int],
        generator: torch.Generator,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.prompts, self.temperature, self.max_tokens = prompts, temperature, max_tokens
        self.stop_ids, self.generator = stop_ids, generator
        self.gamma = drafter.config.num_speculative_tokens
        self.longest = max(len(prompt) for prompt in prompts) + max_tokens + self.gamma + 1
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.active = list(range(len(prompts)))
        self.target_kv = self._caches(target.config.num_layers, target.config.num_kv_heads, target.config.head_dim)
        shape = drafter.config.decoder
        self.draft_kv = self._caches(shape.num_layers, shape.num_kv_heads, shape.head_dim)

    def _caches(self, layers: int, heads: int, size: int) -> list[LayerKV]:
        dtype = self.target.embed_tokens.weight.dtype
        shape = (len(self.prompts) * self.longest, heads, size)
        return [LayerKV(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(layers)]

    def _committed(self, request: int) -> int:
        """Tokens before the anchor."""
        return len(self.prompts[request]) + len(self.outputs[request]) - 1

    def prefill(self) -> None:
        rows = {r: list(self.prompts[r]) for r in self.active}
        hidden, taps, positions, slots = self._run_target(rows, dict.fromkeys(rows, 0))
        self.drafter.write_context(taps, positions, self.draft_kv, slots)
        ends = torch.tensor([len(prompt) for prompt in self.prompts]).cumsum(0) - 1
        first = self._draw(self._probs(self.target.compute_logits(hidden[ends])))
        for request, token in enumerate(first.tolist()):
            self._emit(request, [token])

    def round(self, totals: ClosedLoop) -> None:
        """Draft, verify, accept, commit, for every active request."""
        requests, width = list(self.active), self.gamma + 1
        anchors = torch.tensor([self.outputs[r][-1] for r in requests])
        drafts_RG, q_RGV = self._draft(requests, anchors)
        rows = {r: [self.outputs[r][-1], *drafts_RG[i].tolist()] for i, r in enumerate(requests)}
        begin = {r: self._committed(r) for r in requests}
        hidden, taps, positions, slots = self._run_target(rows, begin)
        p_RWV = self._probs(self.target.compute_logits(hidden)).view(len(requests), width, -1)
        keep = torch.zeros(len(requests), width, dtype=torch.bool)
        for i, request in enumerate(requests):
            accepted, last = self._accept(drafts_RG[i], q_RGV[i], p_RWV[i])
            keep[i, : accepted + 1] = True
            totals.rounds += 1
            totals.accepted[accepted] += 1
            totals.emitted += self._emit(request, [*drafts_RG[i, :accepted].tolist(), last])
        kept_N = keep.flatten()
        self.drafter.write_context(taps[kept_N], positions[kept_N], self.draft_kv, slots[kept_N])

    def _draft(self, requests: list[int], anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids [R, G] (target ids) and what they were drawn from, [R, G, V]."""
        context = torch.tensor([self._committed(r) for r in requests])
        metadata = BlockMetadata(
            context_lens_R=context.to(torch.int32),
            block_tables_RB=torch.tensor(requests, dtype=torch.int32)[:, None],
            kv_block_size=self.longest,
            block_width=self.drafter.config.block_width,
            max_context_len=int(context.max()),
        )
        experts = ExpertMetadata.single(anchors.shape[0] * self.drafter.config.block_width)
        hidden = self.drafter.forward(anchors, context, self.draft_kv, metadata, experts)[:, self.drafter.slot_offset :]
        base = self.drafter.compute_base_logits(hidden.flatten(0, 1)).view(len(requests), self.gamma, -1)
        state, previous = self.drafter.markov_state(len(requests)), anchors
        drafts: list[Tensor] = []
        steps: list[Tensor] = []
        for slot in range(self.gamma):
            bias, state = self.drafter.markov_bias(previous, hidden[:, slot], state)
            probs = self._probs(base[:, slot] + bias)
            previous = self.drafter.draft_to_target_V[self._draw(probs)]
            drafts.append(previous)
            wide = probs.new_zeros(len(requests), self.target.config.vocab_size)
            wide[:, self.drafter.draft_to_target_V] = probs
            steps.append(wide)
        return torch.stack(drafts, dim=1), torch.stack(steps, dim=1)

    def _accept(self, drafts_G: Tensor, q_GV: Tensor, p_WV: Tensor) -> tuple[int, int]:
        """How many drafts are kept, and the token after them."""
        for slot, draft in enumerate(drafts_G.tolist()):
            p, q = p_WV[slot], q_GV[slot]
            if float(torch.rand((), generator=self.generator)) * float(q[draft]) < float(p[draft]):
                continue
            left = (p - q).clamp(min=0)
            return slot, int(self._draw((left if float(left.sum()) > 0 else p)[None]))
        return len(drafts_G), int(self._draw(p_WV[-1:]))

    def _emit(self, request: int, tokens: list[int]) -> int:
        """Append up to the first end token or the limit; how many were appended."""
        output, before = self.outputs[request], len(self.outputs[request])
        for token in tokens:
            output.append(token)
            if token in self.stop_ids or len(output) >= self.max_tokens:
                self.active.remove(request)
                break
        return len(output) - before

    def _probs(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(logits / self.temperature, dim=-1)

    def _draw(self, weights: Tensor) -> Tensor:
        return torch.multinomial(weights, 1, generator=self.generator)[:, 0]

    def _run_target(self, rows: dict[int, list[int]], begin: dict[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One pass over consecutive tokens of each request; final hidden, taps, positions and slots of all rows."""
        widths = torch.tensor([len(tokens) for tokens in rows.values()])
        positions = torch.cat([torch.arange(begin[r], begin[r] + len(tokens)) for r, tokens in rows.items()])
        slots = torch.tensor(list(rows)).repeat_interleave(widths) * self.longest + positions
        ends = torch.tensor([begin[r] + len(tokens) for r, tokens in rows.items()])
        metadata = CausalMetadata(
            query_start_loc_R1=torch.cat((torch.zeros(1, dtype=torch.int64), widths.cumsum(0))).to(torch.int32),
            seq_lens_R=ends.to(torch.int32),
            block_tables_RB=torch.tensor(list(rows), dtype=torch.int32)[:, None],
            slot_mapping_N=slots,
            kv_block_size=self.longest,
            max_query_len=int(widths.max()),
            max_seq_len=int(ends.max()),
        )
        tokens = torch.tensor([token for row in rows.values() for token in row])
        taps = self.drafter.config.target_layer_ids
        experts = ExpertMetadata.single(tokens.shape[0])
        output = self.target.forward(tokens, positions, self.target_kv, metadata, taps, experts)
        return output.hidden_ND, output.taps_NF, positions, slots
