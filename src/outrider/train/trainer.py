"""The training loop: packed batches, bf16 matmuls over fp32 parameters, resumable at any step.

Contract: everything random is a function of (seed, step), the schedule a function of progress = the larger of
step / steps and elapsed / max_minutes. A state file holds parameters, optimiser, step and elapsed seconds; resuming
from it gives bit for bit what an uninterrupted run would have given (as long as the clock does not drive the schedule).

Loss: at first KL to the teacher, later the L1 distance that acceptance is made of, plus cross-entropy on the text's
own tokens and the distance to the target's own hidden states, each with its weight; the confidence head learns the
acceptance probability from detached inputs.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outrider.errors import CheckpointError
from outrider.logger import get_logger
from outrider.models.dspark import DSparkDrafter
from outrider.train.anchors import AnchorBatch, BatchPlan, build_batch, random_stream, valid_anchors
from outrider.train.data import Span, TokenStore
from outrider.train.losses import (
    Columns,
    LossWeights,
    SlotFigures,
    choose_columns,
    confidence_loss,
    distribution_loss,
    slot_weights,
    teacher_over,
)

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    steps: int
    max_minutes: float  # 0: no limit
    sequences: int  # per step
    anchors: int  # per sequence
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    seed: int
    warmup: float = 0.04  # share of the run
    clip: float = 1.0
    slot_decay: float = 2.5  # slot k weighs exp(-k / slot_decay)
    kl_from: float = 0.2  # progress until which the loss is KL alone; it fades
    kl_until: float = 0.6  # from there to here
    ce: float = 0.0  # weight of cross-entropy on the tokens of text said at temperature 0
    loss_columns: int = 0  # of the draft vocabulary that a step's loss looks at; 0: all
    feature: float = 0.0  # weight of the distance to the target's own final hidden state


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Teacher-forced acceptance on sequences that were not trained on, counted as the closed loop counts.

    At temperature 0 a slot counts if all slots so far hit the text's token. At temperature 1 the text is a sample of
    the target: a slot counts with sum min(p, q) times min(1, q / p) of each of the text's tokens before it.
    """

    length_greedy: float  # accepted length, bonus token included; 0.0 where there is no such text
    length_sampled: float
    slots_greedy: tuple[float, ...]  # conditional acceptance per slot
    slots_sampled: tuple[float, ...]

    def describe(self) -> str:
        def rates(values: Sequence[float]) -> str:
            return " ".join(f"{value:.3f}" for value in values)

        return (
            f"accepted length T=0 {self.length_greedy:.3f} ({rates(self.slots_greedy)}), "
            f"T=1 {self.length_sampled:.3f} ({rates(self.slots_sampled)})"
        )


class Trainer:
    def __init__(
        self,
        drafter: DSparkDrafter,
        store: TokenStore,
        settings: TrainSettings,
        *,
        train_spans: Sequence[Span],
        held_out_spans: Sequence[Span],
        dtype: torch.dtype,
    ) -> None:
        assert drafter.slot_offset == 0, "training drafts from the anchor row"
        self.drafter, self.store, self.settings, self.dtype = drafter, store, settings, dtype
        self.num_slots = drafter.config.num_speculative_tokens
        self.head_WD = drafter.lm_head.weight.detach().to(dtype)
        vocab = drafter.config.decoder.vocab_size
        self.column_V = torch.full((vocab,), -1)
        self.column_V[drafter.draft_to_target_V] = torch.arange(drafter.config.draft_vocab_size)
        self.plan = BatchPlan(
            store, train_spans, batch=settings.sequences, anchors=settings.anchors, seed=settings.seed
        )
        self.held_out_spans = held_out_spans
        self.parameters = trainable_parameters(drafter)
        self.optimizers = make_optimizers(self.parameters, settings)
        self.slot_weight_G = slot_weights(self.num_slots, settings.slot_decay)
        self.step, self.elapsed = 0, 0.0

    @property
    def progress(self) -> float:
        done = self.step / self.settings.steps
        if self.settings.max_minutes:
            done = max(done, self.elapsed / (60 * self.settings.max_minutes))
        return min(done, 1.0)

    def run(
        self, *, until_step: int, on_step: Callable[[float, float], None], every: int, checkpoint: Callable[[], None]
    ) -> None:
        """Train to ``until_step`` or the end; ``on_step`` gets loss and acceptance, ``checkpoint`` runs at times."""
        while self.step < until_step and self.progress < 1.0:
            began = time.monotonic()
            loss, accepted = self.train_step()
            self.step += 1
            self.elapsed += time.monotonic() - began
            on_step(loss, accepted)
            if every and self.step % every == 0:
                checkpoint()

    def train_step(self) -> tuple[float, float]:
        batch = self.plan.at(self.step, num_slots=self.num_slots)
        rate = self.settings.learning_rate * schedule(self.progress, warmup=self.settings.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group["rate"]
        share = kl_share(self.progress, start=self.settings.kl_from, stop=self.settings.kl_until)
        weights = LossWeights(l1=1 - share, kl=share, ce=self.settings.ce)
        loss, figures = self.losses(batch, weights, columns=self.settings.loss_columns)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), float(figures.accept_N.mean())

    def losses(self, batch: AnchorBatch, weights: LossWeights, *, columns: int = 0) -> tuple[Tensor, SlotFigures]:
        drafter = self.drafter
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden_BAGD = drafter.forward_packed(
                batch.taps_BCF,
                batch.positions_BC,
                batch.anchor_ids_BA,
                batch.anchor_positions_BA,
                batch.visible_BAC,
            )
            features_BAGr = self._markov_features(batch, hidden_BAGD)
        hidden_ND = hidden_BAGD.flatten(0, 2)[batch.slot_N]
        features_Nr = features_BAGr.flatten(0, 2)[batch.slot_N]
        weight_N = self.slot_weight_G[batch.slot_N % self.num_slots]
        teacher_UD, label_N = batch.hidden_UD.to(self.dtype), self.column_V[batch.next_N]
        chosen = None
        if 0 < columns < self.head_WD.shape[0]:
            chosen = self._columns(teacher_UD, batch.lse_U, label_N, columns)
        teacher = teacher_over(
            chosen,
            hidden_UD=teacher_UD,
            head_VD=self.head_WD,
            lse_U=batch.lse_U,
            row_N=batch.teacher_row_N,
            label_N=label_N,
            greedy_N=batch.greedy_N,
        )
        head = drafter.markov_head
        w2_Wr = head.markov_w2.weight if head is not None else self.head_WD.new_zeros(self.head_WD.shape[0], 0)
        loss, figures = distribution_loss(
            hidden_ND,
            features_Nr,
            w2_Wr,
            head_VD=self.head_WD,
            teacher=teacher,
            weight_N=weight_N,
            weights=weights,
            columns=chosen,
        )
        if self.settings.feature:
            wanted_ND = batch.hidden_UD.float()[batch.teacher_row_N]
            distance_N = (hidden_ND.float() - wanted_ND).pow(2).mean(-1) / wanted_ND.pow(2).mean()
            loss = loss + self.settings.feature * (distance_N * weight_N).sum() / weight_N.sum()
        if drafter.confidence_head is not None:
            previous_N = batch.previous_BAG.flatten()[batch.slot_N]
            inputs_NX = hidden_ND.detach().float()
            if drafter.config.confidence_head_with_markov and head is not None:
                inputs_NX = torch.cat((inputs_NX, head.markov_w1(previous_N).detach().float()), dim=-1)
            loss = loss + confidence_loss(drafter.confidence_head(inputs_NX), figures.accept_N, weight_N)
        return loss, figures

    def _columns(self, teacher_UD: Tensor, lse_U: Tensor, label_N: Tensor, count: int) -> Columns | None:
        """The columns of this step's loss. Every second teacher row is asked, for half the price."""
        logits_SV = teacher_UD[::2] @ self.head_WD.T
        logits_SV -= lse_U[::2, None].to(logits_SV.dtype)
        return choose_columns(logits_SV.amax(0), label_N, count, random_stream(self.settings.seed, 2, self.step))

    def _markov_features(self, batch: AnchorBatch, hidden_BAGD: Tensor) -> Tensor:
        """What the Markov head's last matrix multiplies, with the text's tokens as previous ones."""
        drafter = self.drafter
        if drafter.config.markov_head_type != "rnn":  # stateless: all slots at once
            rows = hidden_BAGD.flatten(0, 2)
            features, _ = drafter.markov_features(
                batch.previous_BAG.flatten(), rows, drafter.markov_state(rows.shape[0])
            )
            return features.view(*hidden_BAGD.shape[:3], -1)
        bins, anchors, slots, _ = hidden_BAGD.shape
        state = drafter.markov_state(bins * anchors)
        steps: list[Tensor] = []
        for slot in range(slots):
            previous = batch.previous_BAG[:, :, slot].flatten()
            features, state = drafter.markov_features(previous, hidden_BAGD[:, :, slot].flatten(0, 1), state)
            steps.append(features.view(bins, anchors, -1))
        return torch.stack(steps, dim=2)

    @torch.no_grad()
    def evaluate(self, *, anchors: int = 40) -> HeldOut:
        greedy = [span for span in self.held_out_spans if span.temperature == 0]
        sampled = [span for span in self.held_out_spans if span.temperature == 1]
        length_greedy, slots_greedy = self._accepted(greedy, anchors, greedy=True)
        length_sampled, slots_sampled = self._accepted(sampled, anchors, greedy=False)
        return HeldOut(length_greedy, length_sampled, slots_greedy, slots_sampled)

    def _accepted(self, spans: Sequence[Span], anchors: int, *, greedy: bool) -> tuple[float, tuple[float, ...]]:
        """Accepted length and conditional acceptance per slot over evenly spaced anchors with a full block ahead."""
        slots, reached_G, kept_G = self.num_slots, torch.zeros(self.num_slots), torch.zeros(self.num_slots)
        ordered = sorted(spans, key=lambda span: span.stop - span.start)
        for start in range(0, len(ordered), self.settings.sequences):
            chosen: list[tuple[Span, Tensor]] = []
            for span in ordered[start : start + self.settings.sequences]:
                valid = valid_anchors(self.store, span)
                valid = valid[valid + slots < span.stop - span.start]
                if len(valid):
                    even = torch.linspace(0, len(valid) - 1, min(anchors, len(valid))).long()
                    chosen.append((span, valid[even]))
            if not chosen:
                continue
            batch = build_batch(self.store, [s for s, _ in chosen], [a for _, a in chosen], num_slots=slots)
            _, figures = self.losses(batch, LossWeights(l1=1.0, kl=0.0, ce=0.0))
            accept_XG = (figures.greedy_hit_N.float() if greedy else figures.accept_N).view(-1, slots)
            carry_XG = (figures.greedy_hit_N.float() if greedy else figures.label_accept_N).view(-1, slots)
            before_XG = torch.cat((torch.ones_like(carry_XG[:, :1]), carry_XG[:, :-1]), dim=1).cumprod(dim=1)
            reached_G += before_XG.sum(0)
            kept_G += (before_XG * accept_XG).sum(0)
        if not reached_G[0]:
            return 0.0, ()
        rates = (kept_G / reached_G.clamp(min=1e-9)).tolist()
        return 1.0 + float((kept_G / reached_G[0]).sum()), tuple(rates)

    # State.

    def save_state(self, path: Path) -> None:
        state = {
            "step": self.step,
            "elapsed": self.elapsed,
            "draft_to_target": self.drafter.draft_to_target_V,
            "mask_token_id": self.drafter.config.mask_token_id,
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    @torch.no_grad()
    def load_state(self, path: Path) -> None:
        state = read_state(path)
        for name, parameter in self.parameters.items():
            saved = state["parameters"].get(name)
            if saved is None or saved.shape != parameter.shape:
                found = "nothing" if saved is None else str(tuple(saved.shape))
                raise CheckpointError(f"resume: {path} has {found} for {name}, not {tuple(parameter.shape)}")
            parameter.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed = state["step"], state["elapsed"]


def read_state(path: Path) -> dict[str, Any]:
    """What ``save_state`` wrote."""
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"resume: {path} cannot be read ({error})") from error
    return state


def trainable_parameters(drafter: DSparkDrafter) -> dict[str, nn.Parameter]:
    """The drafter's own parameters; the target's embedding and head stay frozen."""
    shared = ("embed_tokens.weight", "lm_head.weight")
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name not in shared)
    return {name: parameter for name, parameter in drafter.named_parameters() if name not in shared}


def make_optimizers(parameters: dict[str, nn.Parameter], settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices of the backbone and AdamW for the rest."""

    def is_matrix(name: str) -> bool:
        return settings.optimizer == "muon" and parameters[name].ndim == 2 and name.startswith(("layers.", "fc."))

    matrices = [parameter for name, parameter in parameters.items() if is_matrix(name)]
    others = [parameter for name, parameter in parameters.items() if not is_matrix(name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [{"params": others, "rate": 1.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
    ]
    if matrices:
        group = [{"params": matrices, "rate": 1.0}]
        optimizers.append(
            torch.optim.Muon(group, lr=settings.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def schedule(progress: float, *, warmup: float) -> float:
    """Linear from 0 over ``warmup``, then half a cosine down to 0."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def kl_share(progress: float, *, start: float, stop: float) -> float:
    """1 until ``start``, 0 from ``stop``, linear between."""
    if progress >= stop:
        return 0.0
    return 1.0 if progress <= start else (stop - progress) / (stop - start)
