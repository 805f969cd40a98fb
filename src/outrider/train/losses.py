"""The drafter's losses over many slots at once, with analytic gradients and no autograd graph over the vocabulary.

Per slot, with draft distribution q over the draft vocabulary, teacher p over the full one (only its draft rows are
read; ``lse`` is the log-sum-exp of all its logits, so mass outside the draft vocabulary stays missing; where compiled
passes made it, by their int8 head), and the token that followed as label:

    l1 * (sum |q - p| + p outside)  +  kl * sum p log(p / q)  +  ce * -log q(label)

The first term is twice the probability that a draft is rejected at temperature 1. Each slot has a weight; the loss is
the weighted mean. Along with it come the figures evaluation needs: the acceptance probability sum min(p, q), and for
the label min(1, q / p), the probability that it would have been accepted had it been drafted. The last term counts
where the label is the target's own greedy choice (text said at temperature 0): elsewhere a label is one sample of p,
which the others know in full.

With ``Columns`` the sums run over the columns that matter to these rows and a random sample of the others, each sampled
one standing for as many as it was drawn from (``shift`` is the logarithm of that number): the same in expectation but
for the logarithm of q's normaliser, at a fraction of the cost.

``distribution_loss`` is the whole head: base logits and Markov bias are one matmul with the stacked [head | w2], done
chunk by chunk; the gradients of hidden states, Markov features and w2 are made in the forward pass.

Shape legend: N slots, U teacher rows, V draft vocabulary (C of it with ``Columns``), D hidden size, r Markov rank.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.ops.loops import compiled, pointers

_CHUNK = 512  # slots whose logits exist at the same time
_CHUNK_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    l1: float
    kl: float
    ce: float


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """What the rows said, per slot; no gradients."""

    loss_N: Tensor  # fp32, unweighted
    accept_N: Tensor  # fp32, sum of min(p, q)
    label_accept_N: Tensor  # fp32, min(1, q / p) at the label; 0 for a label outside the draft vocabulary
    greedy_hit_N: Tensor  # bool, the draft's most likely token is the label


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    logits_UV: Tensor  # of the draft rows
    lse_U: Tensor  # fp32, over the full vocabulary
    row_N: Tensor  # int64: each slot's row
    label_N: Tensor  # int64 draft id of the token that followed; -1: outside the draft vocabulary
    greedy_N: Tensor  # fp32: 1 where that token was said at temperature 0, else 0


@dataclass(frozen=True, slots=True)
class Columns:
    """The part of the draft vocabulary that one step's loss is made of."""

    index_C: Tensor  # int64, distinct
    shift_C: Tensor  # fp32: 0 for a chosen column, log(others / sampled others) for a sampled one


def choose_columns(highest_V: Tensor, label_N: Tensor, count: int, generator: torch.Generator) -> Columns | None:
    """``count`` columns: every label, the highest of ``highest_V``, and a quarter drawn from the others.

    ``highest_V``: for every column the largest log-probability that some teacher rows give it. None if ``count`` is the
    whole vocabulary, or if the labels alone take the room.
    """
    vocab = highest_V.shape[0]
    sampled = count // 4
    if count >= vocab:
        return None
    highest_V = highest_V.float().index_fill(0, label_N[label_N >= 0], torch.inf)
    if int(highest_V.isinf().sum()) > count - sampled:
        return None
    chosen = highest_V.topk(count - sampled).indices
    rest_V = torch.ones(vocab, dtype=torch.bool)
    rest_V[chosen] = False
    rest = rest_V.nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=generator)[:sampled]]
    shift_C = torch.zeros(count)
    shift_C[count - sampled :] = torch.tensor(len(rest) / max(sampled, 1)).log()
    return Columns(torch.cat((chosen, drawn)), shift_C)


def teacher_over(
    columns: Columns | None,
    *,
    hidden_UD: Tensor,
    head_VD: Tensor,
    lse_U: Tensor,
    row_N: Tensor,
    label_N: Tensor,
    greedy_N: Tensor,
) -> Teacher:
    """The teacher over ``columns`` alone, or over the whole draft vocabulary; ``label_N`` are draft ids or -1."""
    if columns is None:
        return Teacher(logits_UV=hidden_UD @ head_VD.T, lse_U=lse_U, row_N=row_N, label_N=label_N, greedy_N=greedy_N)
    place_V = torch.full((head_VD.shape[0] + 1,), -1)  # the last for label -1
    place_V[columns.index_C] = torch.arange(len(columns.index_C))
    logits_UC = hidden_UD @ head_VD.index_select(0, columns.index_C).T
    logits_UC += columns.shift_C.to(logits_UC.dtype)
    return Teacher(logits_UV=logits_UC, lse_U=lse_U, row_N=row_N, label_N=place_V[label_N], greedy_N=greedy_N)


_SOURCE = r"""
// logits [N, V] become weight * dloss/dlogits in place; figures [N, 4] are loss, accept, label_accept, greedy hit
extern "C" void slot_losses(bf16* logits, const bf16* teacher, const float* lse, const int64_t* row,
                            const int64_t* label, const float* greedy, const float* weight, float* figures,
                            int N, int V, float l1, float kl, float ce_greedy) {
  #pragma omp parallel for schedule(dynamic, 8)
  for (int n = 0; n < N; ++n) {
    static thread_local std::vector<float> q, p;
    q.resize(V); p.resize(V);
    float* qp = q.data();
    float* pp = p.data();
    bf16* z = logits + size_t(n) * V;
    const bf16* t = teacher + size_t(row[n]) * V;
    const float norm = lse[row[n]], ce = ce_greedy * greedy[n];
    float top = -INFINITY, total = 0.f;
    for (int v = 0; v < V; ++v) { qp[v] = up(z[v]); top = std::max(top, qp[v]); }
    const int64_t y = label[n];
    const bool hit = y >= 0 && qp[y] == top;
    float mass = 0.f, cross = 0.f;
    for (int v = 0; v < V; ++v) {
      const float x = qp[v] - top, logit = up(t[v]) - norm, e = expf(x), teach = expf(logit);
      qp[v] = e; pp[v] = teach;
      total += e; mass += teach; cross += teach * (logit - x);
    }
    const float inverse = 1.f / total, log_total = logf(total);
    float gap = 0.f, pull = 0.f;
    for (int v = 0; v < V; ++v) {
      const float a = qp[v] * inverse, d = a - pp[v];
      qp[v] = a;
      gap += std::fabs(d);
      pull += a * (float(d > 0.f) - float(d < 0.f));
    }
    const float outside = std::max(0.f, 1.f - mass), inside = y >= 0 ? 1.f : 0.f;
    const float log_q = y >= 0 ? up(z[y]) - top - log_total : 0.f;
    figures[n * 4] = l1 * (gap + outside) + kl * (cross + mass * log_total) - ce * log_q;
    figures[n * 4 + 1] = 1.f - 0.5f * (gap + std::fabs(1.f - mass));
    figures[n * 4 + 2] = y >= 0 ? std::min(1.f, expf(log_q - (up(t[y]) - norm))) : 0.f;
    figures[n * 4 + 3] = hit ? 1.f : 0.f;
    const float w = weight[n], scale = kl * mass + ce * inside - l1 * pull;
    for (int v = 0; v < V; ++v) {
      const float d = qp[v] - pp[v], sign = d > 0.f ? l1 : (d < 0.f ? -l1 : 0.f);
      z[v] = down(w * (qp[v] * (sign + scale) - kl * pp[v]));
    }
    if (y >= 0) {
      const float d = qp[y] - pp[y], sign = d > 0.f ? l1 : (d < 0.f ? -l1 : 0.f);
      z[y] = down(w * (qp[y] * (sign + scale) - kl * pp[y] - ce));
    }
  }
}
"""


def slot_losses(logits_NV: Tensor, teacher: Teacher, weight_N: Tensor, weights: LossWeights) -> SlotFigures:
    """The figures of every slot; ``logits_NV`` becomes weight * d loss / d logits, in place."""
    N, V = logits_NV.shape
    bf16 = logits_NV.dtype == teacher.logits_UV.dtype == torch.bfloat16
    library = compiled(_SOURCE) if bf16 and logits_NV.device.type == "cpu" else None
    if library is not None:
        figures_N4 = torch.empty(N, 4)
        slots = (teacher.row_N, teacher.label_N, teacher.greedy_N)
        tensors = (teacher.logits_UV, teacher.lse_U, *slots, weight_N, figures_N4)
        factors = (ctypes.c_float(factor) for factor in (weights.l1, weights.kl, weights.ce))
        library.slot_losses(*pointers(logits_NV, *tensors), N, V, *factors)
        loss_N, accept_N, label_accept_N, hit_N = figures_N4.unbind(1)
        return SlotFigures(loss_N, accept_N, label_accept_N, hit_N > 0)
    return _slot_losses_torch(logits_NV, teacher, weight_N, weights)


def _slot_losses_torch(logits_NV: Tensor, teacher: Teacher, weight_N: Tensor, weights: LossWeights) -> SlotFigures:
    log_q_NV = torch.log_softmax(logits_NV.float(), -1)
    log_p_NV = teacher.logits_UV[teacher.row_N].float() - teacher.lse_U[teacher.row_N][:, None]
    q_NV, p_NV = log_q_NV.exp(), log_p_NV.exp()
    known_N, column_N1 = teacher.label_N >= 0, teacher.label_N.clamp(min=0)[:, None]
    one_hot_NV = torch.zeros_like(q_NV).scatter_(1, column_N1, known_N[:, None].float())
    sign_NV = (q_NV - p_NV).sign()
    mass_N, gap_N = p_NV.sum(-1), (q_NV - p_NV).abs().sum(-1)
    label_log_q_N = torch.where(known_N, log_q_NV.gather(1, column_N1)[:, 0], 0.0)
    label_log_p_N = log_p_NV.gather(1, column_N1)[:, 0]
    ce_N = weights.ce * teacher.greedy_N
    loss_N = (
        weights.l1 * (gap_N + (1 - mass_N).clamp(min=0))
        + weights.kl * (p_NV * (log_p_NV - log_q_NV)).sum(-1)
        - ce_N * label_log_q_N
    )
    hit_N = known_N & (logits_NV.gather(1, column_N1)[:, 0] == logits_NV.amax(-1))
    gradient_NV = (
        weights.l1 * q_NV * (sign_NV - (q_NV * sign_NV).sum(-1, keepdim=True))
        + weights.kl * (mass_N[:, None] * q_NV - p_NV)
        + ce_N[:, None] * (known_N[:, None] * q_NV - one_hot_NV)
    )
    logits_NV.copy_(weight_N[:, None] * gradient_NV)
    return SlotFigures(
        loss_N,
        1 - 0.5 * (gap_N + (1 - mass_N).abs()),
        torch.where(known_N, (label_log_q_N - label_log_p_N).exp().clamp(max=1.0), 0.0),
        hit_N,
    )


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        features_Nr: Tensor,
        w2_Vr: Tensor,
        head_VD: Tensor,
        shift_V: Tensor | None,
        teacher: Teacher,
        weight_N: Tensor,
        weights: LossWeights,
    ) -> tuple[Tensor, Tensor]:
        dtype, rank = head_VD.dtype, features_Nr.shape[1]
        inputs_NX = torch.cat((hidden_ND.to(dtype), features_Nr.to(dtype)), dim=1)  # X = D + r
        stacked_VX = torch.cat((head_VD, w2_Vr.to(dtype)), dim=1)
        scaled_N = weight_N / weight_N.sum().clamp(min=1e-9)
        rows = inputs_NX.shape[0]
        spare = -rows % _CHUNK_STEP  # rows of weight 0: products of every other size would have to be set up
        inputs_NX = F.pad(inputs_NX, (0, 0, 0, spare))
        padded_N = F.pad(scaled_N, (0, spare))
        teacher = replace(
            teacher,
            row_N=F.pad(teacher.row_N, (0, spare)),
            label_N=F.pad(teacher.label_N, (0, spare), value=-1),
            greedy_N=F.pad(teacher.greedy_N, (0, spare)),
        )
        gradient_NX = torch.empty_like(inputs_NX)
        w2_gradient_Vr = torch.zeros_like(w2_Vr, dtype=torch.float32)
        figures: list[Tensor] = []
        for start in range(0, inputs_NX.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            logits_NV = inputs_NX[part] @ stacked_VX.T
            if shift_V is not None:
                logits_NV += shift_V.to(dtype)
            chunk = replace(
                teacher, row_N=teacher.row_N[part], label_N=teacher.label_N[part], greedy_N=teacher.greedy_N[part]
            )
            # Weights sum to about N inside the kernel: gradients of one slot would be denormal in a mean over many.
            raised_N = padded_N[part] * rows
            found = slot_losses(logits_NV, chunk, raised_N, weights)
            gradient_NX[part] = logits_NV @ stacked_VX
            if rank:
                w2_gradient_Vr += (logits_NV.T @ inputs_NX[part, -rank:]).float()
            columns = (found.loss_N, found.accept_N, found.label_accept_N, found.greedy_hit_N.float())
            figures.append(torch.stack(columns, dim=1))
        figures_N4 = torch.cat(figures)[:rows]
        ctx.save_for_backward(gradient_NX[:rows], w2_gradient_Vr)
        ctx.sizes = (hidden_ND.shape[1], 1 / rows, hidden_ND.dtype, features_Nr.dtype, w2_Vr.dtype)
        ctx.mark_non_differentiable(figures_N4)
        return (figures_N4[:, 0] * scaled_N).sum(), figures_N4

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient_NX, w2_gradient_Vr = ctx.saved_tensors
        hidden, shrink, hidden_dtype, features_dtype, w2_dtype = ctx.sizes
        factor = outer[0] * shrink
        hidden_ND = gradient_NX[:, :hidden].to(hidden_dtype) * factor.to(hidden_dtype)
        features_Nr = gradient_NX[:, hidden:].to(features_dtype) * factor.to(features_dtype)
        return hidden_ND, features_Nr, (w2_gradient_Vr * factor).to(w2_dtype), None, None, None, None, None


def distribution_loss(
    hidden_ND: Tensor,
    features_Nr: Tensor,
    w2_Vr: Tensor,
    *,
    head_VD: Tensor,
    teacher: Teacher,
    weight_N: Tensor,
    weights: LossWeights,
    columns: Columns | None = None,
) -> tuple[Tensor, SlotFigures]:
    """Weighted mean loss (differentiable in the first three arguments) and every slot's figures.

    ``head_VD`` is frozen and sets the dtype of the matmuls; r may be 0. With ``columns``, over which ``teacher`` must
    be, the figures are estimates too, and ``greedy_hit_N`` means nothing.
    """
    shift_C = None
    if columns is not None:
        w2_Vr, head_VD = w2_Vr.index_select(0, columns.index_C), head_VD.index_select(0, columns.index_C)
        shift_C = columns.shift_C
    loss, figures_N4 = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, features_Nr, w2_Vr, head_VD, shift_C, teacher, weight_N, weights
    )
    loss_N, accept_N, label_accept_N, hit_N = figures_N4.unbind(1)
    return loss, SlotFigures(loss_N, accept_N, label_accept_N, hit_N > 0)


def confidence_loss(logits_N: Tensor, accept_N: Tensor, weight_N: Tensor) -> Tensor:
    """Weighted mean binary cross-entropy of confidence logits against acceptance probabilities."""
    losses_N = F.binary_cross_entropy_with_logits(logits_N, accept_N.detach().clamp(0, 1), reduction="none")
    return (losses_N * weight_N).sum() / weight_N.sum().clamp(min=1e-9)


def slot_weights(num_slots: int, decay: float) -> Tensor:
    """exp(-k / decay) for slot k: a later slot matters only when those before it were accepted."""
    return torch.exp(-torch.arange(num_slots, dtype=torch.float32) / decay)
