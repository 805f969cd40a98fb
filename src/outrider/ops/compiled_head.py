"""What the compiled walk reads of a drafter: tables of its sequential head.

A drafter has one where its head is such a table: no Markov head, or one whose features are a row by the token before
(``vanilla``). Other heads look at hidden states and are walked by their modules.

Shape legend: V target vocabulary, Vd draft vocabulary, r Markov rank, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.ops.packed_matrix import PackedMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovTable:
    features_Vr: Tensor  # by the token before, fp32 or bf16
    bias: PackedMatrix  # what turns them into logits: r inputs, Vd outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledHead:
    vocab_size: int  # of the target, whose ids the tokens before are
    markov: MarkovTable | None
    confidence_X: Tensor | None  # fp32, weights [D] or [D + r] and the bias behind them; None: no confidence head
    draft_to_target_V: Tensor | None  # int64 [Vd]; None: draft ids are the first Vd target ids
