"""Analytic gradients against autograd, the compiled loop against torch, and what the figures mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.losses import (
    Columns,
    LossWeights,
    SlotFigures,
    Teacher,
    choose_columns,
    confidence_loss,
    distribution_loss,
    slot_weights,
    teacher_over,
)

_FULL, _DRAFT, _HIDDEN, _RANK, _SLOTS, _ROWS = 90, 70, 12, 5, 40, 17


def _problem(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    full_UV = 3 * normal(_ROWS, _FULL)
    row_N = torch.randint(0, _ROWS, (_SLOTS,), generator=generator)
    label_N = torch.randint(0, _FULL, (_SLOTS,), generator=generator)
    return {
        "hidden": normal(_SLOTS, _HIDDEN),
        "features": normal(_SLOTS, _RANK),
        "w2": normal(_DRAFT, _RANK),
        "head": normal(_DRAFT, _HIDDEN).to(dtype),
        "teacher": full_UV[:, :_DRAFT].to(dtype).contiguous(),
        "lse": torch.logsumexp(full_UV, -1),
        "row": row_N,
        "label": torch.where(label_N < _DRAFT, label_N, -1),
        "greedy": torch.arange(_SLOTS) % 3 % 2.0,
        "weight": torch.rand(_SLOTS, generator=generator),
    }


def _run(x: dict[str, Tensor], weights: LossWeights) -> tuple[Tensor, SlotFigures]:
    teacher = Teacher(logits_UV=x["teacher"], lse_U=x["lse"], row_N=x["row"], label_N=x["label"], greedy_N=x["greedy"])
    return distribution_loss(
        x["hidden"], x["features"], x["w2"], head_VD=x["head"], teacher=teacher, weight_N=x["weight"], weights=weights
    )


def _by_autograd(x: dict[str, Tensor], weights: LossWeights) -> tuple[Tensor, Tensor]:
    """The loss from the formulas in the module's docstring, and sum min(p, q), plainly."""
    log_q = torch.log_softmax(x["hidden"] @ x["head"].T + x["features"] @ x["w2"].T, -1)
    log_p = (x["teacher"] - x["lse"][:, None])[x["row"]]
    q, p = log_q.exp(), log_p.exp()
    distance = (q - p).abs().sum(-1) + 1 - p.sum(-1)
    divergence = (p * (log_p - log_q)).sum(-1)
    label = F.nll_loss(log_q, x["label"].clamp(min=0), reduction="none") * (x["label"] >= 0)
    losses = weights.l1 * distance + weights.kl * divergence + weights.ce * x["greedy"] * label
    return (losses * x["weight"]).sum() / x["weight"].sum(), torch.minimum(p, q).sum(-1)


def test_analytic_gradients_equal_autograd() -> None:
    for weights in (LossWeights(l1=1, kl=0, ce=0), LossWeights(l1=0, kl=1, ce=0), LossWeights(l1=0.9, kl=0.5, ce=0.1)):
        x, y = _problem(), _problem()
        inputs = [[z[name].requires_grad_() for name in ("hidden", "features", "w2")] for z in (x, y)]
        loss, figures = _run(x, weights)
        expected, accept = _by_autograd(y, weights)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(figures.accept_N, accept)
        (2.5 * loss).backward()  # type: ignore[no-untyped-call]
        (2.5 * expected).backward()  # type: ignore[no-untyped-call]
        for got, want in zip(*inputs, strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)


def test_bf16_loop_agrees_with_fp32() -> None:
    """bf16 on the CPU takes the compiled loop where there is a compiler; it rounds logits, nothing else."""
    weights = LossWeights(l1=0.9, kl=0.3, ce=0.1)
    low, high = _problem(torch.bfloat16), _problem(torch.bfloat16)
    high["head"], high["teacher"] = high["head"].float(), high["teacher"].float()
    for x in (low, high):
        x["hidden"].requires_grad_()
    loss, figures = _run(low, weights)
    expected, expected_figures = _run(high, weights)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    torch.testing.assert_close(figures.accept_N, expected_figures.accept_N, rtol=0, atol=3e-2)
    torch.testing.assert_close(figures.label_accept_N, expected_figures.label_accept_N, rtol=0, atol=6e-2)
    loss.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    got, want = low["hidden"].grad, high["hidden"].grad
    assert got is not None
    assert want is not None
    assert F.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.999


def test_label_acceptance_and_greedy_hits() -> None:
    x = _problem()
    _, figures = _run(x, LossWeights(l1=1, kl=0, ce=0))
    logits = x["hidden"] @ x["head"].T + x["features"] @ x["w2"].T
    ratio = torch.softmax(logits, -1) / (x["teacher"] - x["lse"][:, None])[x["row"]].exp()
    expected = ratio.gather(1, x["label"].clamp(min=0)[:, None])[:, 0].clamp(max=1) * (x["label"] >= 0)
    torch.testing.assert_close(figures.label_accept_N, expected)
    assert torch.equal(figures.greedy_hit_N, logits.argmax(-1) == x["label"])
    assert (figures.label_accept_N[x["label"] < 0] == 0).all()


def test_perfect_draft_has_no_loss_and_is_always_accepted() -> None:
    x = _problem()
    x["features"], x["w2"] = torch.zeros(_SLOTS, _RANK), torch.zeros(_DRAFT, _RANK)
    logits = x["hidden"] @ x["head"].T
    x["teacher"], x["lse"], x["row"] = logits, torch.logsumexp(logits, -1), torch.arange(_SLOTS)
    loss, figures = _run(x, LossWeights(l1=1, kl=1, ce=0))
    assert loss.abs() < 1e-5
    torch.testing.assert_close(figures.accept_N, torch.ones(_SLOTS))


def test_confidence_loss_is_least_at_the_acceptance_itself() -> None:
    accept = torch.tensor([0.2, 0.9])
    weight = torch.tensor([1.0, 3.0])
    best = confidence_loss(torch.logit(accept), accept, weight)
    for shift in (-0.3, 0.3):
        assert confidence_loss(torch.logit(accept) + shift, accept, weight) > best


def test_slot_weights_decay() -> None:
    torch.testing.assert_close(slot_weights(3, 2.0), torch.tensor([1.0, 0.60653066, 0.36787944]))


def _highest(x: dict[str, Tensor]) -> Tensor:
    return (x["teacher"] - x["lse"][:, None]).amax(0)


def _teacher(x: dict[str, Tensor], columns: Columns | None) -> Teacher:
    """Logits as hidden states and the identity as head: their product is the logits."""
    return teacher_over(
        columns,
        hidden_UD=x["teacher"],
        head_VD=torch.eye(_DRAFT),
        lse_U=x["lse"],
        row_N=x["row"],
        label_N=x["label"],
        greedy_N=x["greedy"],
    )


def _sampled_sum(values_V: Tensor, columns: Columns) -> float:
    return float((values_V[columns.index_C] + columns.shift_C).exp().sum())


def test_columns_hold_every_label_and_stand_for_the_whole_vocabulary() -> None:
    x = _problem()
    values_V = torch.randn(_DRAFT, generator=torch.Generator().manual_seed(5))
    sums = []
    for seed in range(600):
        columns = choose_columns(_highest(x), x["label"], 56, torch.Generator().manual_seed(seed))
        assert columns is not None
        assert len(set(columns.index_C.tolist())) == 56
        assert set(x["label"].tolist()) - {-1} <= set(columns.index_C[:42].tolist())
        assert torch.equal(columns.shift_C[:42], torch.zeros(42))
        assert abs(float(columns.shift_C[-1].exp()) - (_DRAFT - 42) / 14) < 1e-5
        sums.append(_sampled_sum(values_V, columns))
    assert abs(sum(sums) / len(sums) / float(values_V.exp().sum()) - 1) < 0.01


def test_columns_are_refused_where_they_would_not_hold_the_labels_or_save_nothing() -> None:
    x = _problem()
    generator = torch.Generator().manual_seed(0)
    assert choose_columns(_highest(x), x["label"], _DRAFT, generator) is None
    assert choose_columns(_highest(x), x["label"], 8, generator) is None  # 40 slots have more labels than six


def test_the_loss_over_columns_and_its_gradients_are_near_the_whole() -> None:
    """Teacher and draft are sharp, so that the columns left out weigh little; their gradients are then exact zeros."""
    weights = LossWeights(l1=0.5, kl=0.5, ce=0.1)
    x, y = _problem(), _problem()
    for z in (x, y):
        z["head"][45:] *= 0.05
        z["teacher"][:, 45:] -= 9
        z["label"] = torch.where(z["label"] < 45, z["label"], -1)
    whole, figures = _run(x | {"hidden": x["hidden"].requires_grad_(), "w2": x["w2"].requires_grad_()}, weights)
    whole.backward()  # type: ignore[no-untyped-call]
    y["hidden"].requires_grad_()
    y["w2"].requires_grad_()
    columns = choose_columns(_highest(y), y["label"], 64, torch.Generator().manual_seed(1))
    part, part_figures = distribution_loss(
        y["hidden"],
        y["features"],
        y["w2"],
        head_VD=y["head"],
        teacher=_teacher(y, columns),
        weight_N=y["weight"],
        weights=weights,
        columns=columns,
    )
    part.backward()  # type: ignore[no-untyped-call]
    assert columns is not None
    assert abs(float(part.detach()) / float(whole.detach()) - 1) < 0.02
    assert (part_figures.accept_N - figures.accept_N).abs().max() < 0.05
    near, exact, w2_gradient = y["hidden"].grad, x["hidden"].grad, y["w2"].grad
    assert near is not None
    assert exact is not None
    assert w2_gradient is not None
    assert F.cosine_similarity(near.flatten(), exact.flatten(), dim=0) > 0.98
    left_out = [column for column in range(_DRAFT) if column not in columns.index_C.tolist()]
    assert w2_gradient[left_out].abs().sum() == 0
