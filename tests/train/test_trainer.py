"""Training learns, resumes to the same bits, and measures as the closed loop would; generation tells the truth."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks.fidelity import whole_pass
from tests.fixtures import HIDDEN, VOCAB, make_rand_target
from tests.reference_drafter import ReferenceTarget
from torch import Tensor, nn

from outrider.config import DrafterConfig, QuantizationName
from outrider.layers import mlp, norm
from outrider.layers.attention import projections
from outrider.layers.attention.registry import get_attention_backend
from outrider.models.decoder import Decoder
from outrider.models.drafter_checkpoint import load_drafter
from outrider.models.dspark import DSparkDrafter
from outrider.models.native_decoder import NativeDecoder
from outrider.models.source import LoadedModel, load_model
from outrider.models.tokenizer import Tokenizer
from outrider.ops.fused_training import fused
from outrider.ops.native_kernels import load_kernels
from outrider.train import generate as generation
from outrider.train.data import Span, StoreShape, TokenStore
from outrider.train.export import converted, export
from outrider.train.fast_ops import _sample_rows_torch, decode_attention, sample_rows
from outrider.train.generate import ChatFrame, GenerationSettings, generate
from outrider.train.initialize import bigram_factors, choose_draft_vocab, initialize
from outrider.train.losses import LossWeights
from outrider.train.prompts import QuestionFilter
from outrider.train.trainer import Trainer, TrainSettings, kl_share, schedule

_TAPS = (0, 2)
_SETTINGS = GenerationSettings(
    lanes=3,
    max_question_tokens=12,
    max_answer_tokens=24,
    temperatures=(0.0, 1.0),
    question_temperature=0.75,
    question_top_p=0.95,
    own_question_share=0.5,
    quantization="none",
    seed=4,
)
_TRAIN = TrainSettings(
    steps=6,
    max_minutes=0.0,
    sequences=4,
    anchors=6,
    optimizer="adamw",
    learning_rate=2e-3,
    seed=2,
)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_path: Path) -> LoadedModel:
    return load_model(str(target_path))


@pytest.fixture(scope="module")
def store(target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return _generated(target.model, target.tokenizer, _SETTINGS, tmp_path_factory.mktemp("run") / "data")


def _generated(
    model: Decoder | NativeDecoder, tokenizer: Tokenizer, settings: GenerationSettings, folder: Path
) -> TokenStore:
    made = TokenStore.create(folder, StoreShape(capacity=1200, tap_width=2 * HIDDEN, hidden_size=HIDDEN))
    texts = cycle(f"what is {i}" for i in range(100))
    generate(
        model,
        tokenizer,
        made,
        settings,
        tap_layer_ids=_TAPS,
        texts=texts,
        question_filter=QuestionFilter([]),
        max_seconds=60.0,
        report=lambda tokens: None,
    )
    return made


def _drafter(target: LoadedModel, store: TokenStore, **changes: object) -> DSparkDrafter:
    ids = choose_draft_vocab(store, target.tokenizer, vocab_size=VOCAB, size=60)
    config = DrafterConfig(
        source_format="speculators",
        decoder=replace(target.config, num_layers=2),
        num_speculative_tokens=3,
        sample_from_anchor=True,
        target_layer_ids=_TAPS,
        num_target_layers=4,
        mask_token_id=62,
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        draft_vocab_size=60,
    )
    drafter = DSparkDrafter(
        replace(config, **changes),  # type: ignore[arg-type]
        embedding_VD=target.model.embed_tokens.weight,
        lm_head_VD=nn.Parameter(target.model.lm_head.weight.detach()[ids], requires_grad=False),
        draft_to_target_V=ids,
        backend=get_attention_backend("auto"),
    )
    initialize(drafter, target.model, store, layer_ids=(2, 3))
    return drafter


def _trainer(
    target: LoadedModel,
    store: TokenStore,
    settings: TrainSettings = _TRAIN,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> Trainer:
    return Trainer(
        _drafter(target, store, **changes),
        store,
        settings,
        train_spans=store.spans[:-6],
        held_out_spans=store.spans[-6:],
        dtype=dtype,
    )


def _train(trainer: Trainer, until_step: int) -> list[float]:
    losses: list[float] = []
    trainer.run(until_step=until_step, on_step=lambda loss, _: losses.append(loss), every=0, checkpoint=lambda: None)
    return losses


def test_generated_rows_are_what_the_target_computes(target_path: Path, target: LoadedModel, store: TokenStore) -> None:
    reference, frame = ReferenceTarget(target_path), ChatFrame.of(target.tokenizer)
    assert {span.temperature for span in store.spans} == {0.0, 1.0}
    at_once: list[bool] = []
    for span in store.spans[:8]:
        tokens = store.tokens_C[span.start : span.stop].tolist()
        assert tuple(tokens[: len(frame.head)]) == frame.head
        answer = int(store.answer_C[span.start : span.stop].argmax())
        assert tuple(tokens[answer - len(frame.tail) : answer]) == frame.tail
        logits_TV, features_TF = reference.run(tokens, _TAPS)
        rows = slice(span.start, span.stop - 1)
        torch.testing.assert_close(store.taps_CF[rows], features_TF[:-1].bfloat16(), rtol=2e-2, atol=2e-2)
        lse_T, wanted_T = store.lse_C[rows], torch.logsumexp(logits_TV, -1)[:-1]
        torch.testing.assert_close(lse_T[answer - 1 :], wanted_T[answer - 1 :], rtol=1e-4, atol=1e-4)
        at_once_T = lse_T == torch.inf  # a given question
        torch.testing.assert_close(lse_T[~at_once_T], wanted_T[~at_once_T], rtol=1e-4, atol=1e-4)
        at_once.append(bool(at_once_T[: answer - 1].any()))
        teacher_TV = store.hidden_CD[rows].float() @ reference.head_VD.T
        torch.testing.assert_close(teacher_TV, logits_TV[:-1], rtol=5e-2, atol=5e-2)
        if span.temperature == 0:
            assert tokens[answer:] == logits_TV.argmax(-1)[answer - 1 : -1].tolist()
    assert any(at_once)


@pytest.mark.skipif(load_kernels() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_generated_rows_are_what_the_compiled_target_computes(
    target_path: Path, tmp_path: Path, quantization: QuantizationName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: a row is the same in a step of many lanes and in one pass over its whole sequence."""
    monkeypatch.setattr(generation, "_FILL_ROWS", 8)  # less than two questions
    kernels, loaded = load_kernels(), load_model(str(target_path))
    assert kernels is not None
    native = NativeDecoder.of(kernels, loaded.model, quantization=quantization)
    settings = replace(_SETTINGS, quantization=quantization)
    store = _generated(native, loaded.tokenizer, settings, tmp_path / "data")
    assert {span.temperature for span in store.spans} == {0.0, 1.0}
    for span in store.spans:
        tokens = store.tokens_C[span.start : span.stop - 1].long()
        output = whole_pass(native, tokens, torch.bfloat16, _TAPS)
        logits_TV = native.compute_logits(output.hidden_ND)
        rows = slice(span.start, span.stop - 1)
        assert torch.equal(store.taps_CF[rows], output.taps_NF.bfloat16())
        assert torch.equal(store.hidden_CD[rows], output.hidden_ND.bfloat16())
        answer = int(store.answer_C[span.start : span.stop].argmax())
        lse_T, wanted_T = store.lse_C[rows], torch.logsumexp(logits_TV, -1)
        torch.testing.assert_close(lse_T[answer - 1 :], wanted_T[answer - 1 :], rtol=1e-5, atol=1e-5)
        at_once_T = lse_T == torch.inf
        torch.testing.assert_close(lse_T[~at_once_T], wanted_T[~at_once_T], rtol=1e-5, atol=1e-5)
        if span.temperature == 0:
            said = store.tokens_C[span.start + answer : span.stop].tolist()
            assert said == logits_TV.argmax(-1)[answer - 1 :].tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_uninterrupted_run(
    target: LoadedModel, store: TokenStore, tmp_path: Path, optimizer: str
) -> None:
    settings = replace(_TRAIN, optimizer=optimizer)  # type: ignore[arg-type]
    whole, first, second = (_trainer(target, store, settings) for _ in range(3))
    expected = _train(whole, 6)
    losses = _train(first, 3)
    first.save_state(tmp_path / "state.pt")
    second.load_state(tmp_path / "state.pt")
    assert second.step == 3
    losses += _train(second, 6)
    assert losses == expected
    for name, parameter in whole.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


def test_training_raises_held_out_acceptance(target: LoadedModel, store: TokenStore) -> None:
    trainer = _trainer(target, store, replace(_TRAIN, steps=60, learning_rate=5e-3))
    frozen = trainer.drafter.lm_head.weight.clone(), trainer.drafter.embed_tokens.weight.clone()
    before = trainer.evaluate()
    _train(trainer, 60)
    after = trainer.evaluate()
    assert after.length_sampled > before.length_sampled + 0.05
    assert 1.0 <= after.length_sampled <= 4.0
    assert torch.equal(trainer.drafter.lm_head.weight, frozen[0])
    assert torch.equal(trainer.drafter.embed_tokens.weight, frozen[1])


@pytest.mark.parametrize("head_type", ["gated", "rnn"])
def test_other_markov_heads_train(target: LoadedModel, store: TokenStore, head_type: str) -> None:
    trainer = _trainer(target, store, markov_head_type=head_type)
    head = trainer.drafter.markov_head
    assert head is not None
    projection = head.gate_proj if head_type == "gated" else head.joint_proj
    before = projection.weight.detach().clone()
    _train(trainer, 3)
    assert not torch.equal(projection.weight, before)


def test_export_loads_to_the_same_drafter(target: LoadedModel, store: TokenStore, tmp_path: Path) -> None:
    drafter = _drafter(target, store)
    export(drafter, tmp_path / "out", target="tiny", measurements=[], selftest=None, training={"steps": 3})
    loaded = load_drafter(
        tmp_path / "out",
        target_config=target.config,
        embed_weight=target.model.embed_tokens.weight,
        lm_head_weight=target.model.lm_head.weight,
        dtype="bfloat16",
    )
    expected = dict(converted(drafter, torch.bfloat16).named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter.float(), expected[name].float()), name
    assert torch.equal(loaded.model.draft_to_target_V, drafter.draft_to_target_V)
    assert loaded.card.target == "tiny"
    assert "tiny" in (tmp_path / "out" / "README.md").read_text()


def test_layers_start_as_the_targets(target: LoadedModel, store: TokenStore) -> None:
    """Folding another layer's norm into the projections changes nothing for block rows."""
    drafter, source = _drafter(target, store), target.model.layers[2]
    layer = drafter.layers[0]
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    ours = layer.self_attn.qkv_proj(layer.input_layernorm(rows))  # type: ignore[union-attr, operator]
    theirs = source.self_attn.qkv_proj(source.input_layernorm(rows))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bigram_factors_prefer_what_followed(tmp_path: Path) -> None:
    store = TokenStore.create(tmp_path / "data", StoreShape(capacity=400, tap_width=1, hidden_size=1))
    store.tokens_C[:] = torch.arange(400) * 7 % 20  # token t is always followed by t + 7 mod 20
    store.answer_C[:] = 1
    store.spans.append(Span(start=0, stop=400, temperature=0.0))
    w1, w2 = bigram_factors(store, torch.arange(20), 20, 20)
    assert (w1 @ w2.T).argmax(-1).tolist() == [(t + 7) % 20 for t in range(20)]


def test_schedules() -> None:
    assert schedule(0.0, warmup=0.1) < 0.02
    assert schedule(0.1, warmup=0.1) == pytest.approx(1.0)
    assert schedule(1.0, warmup=0.1) == pytest.approx(0.0)
    assert [kl_share(p, start=0.2, stop=0.6) for p in (0.1, 0.6, 0.9)] == [1.0, 0.0, 0.0]
    assert kl_share(0.4, start=0.2, stop=0.6) == pytest.approx(0.5)


def _attention_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(s, generator=generator) for s in ((3, 6, 16), (3, 9, 2, 16), (3, 9, 2, 16)))
    return query.bfloat16(), key.bfloat16(), value.bfloat16(), torch.tensor([1, 9, 4], dtype=torch.int32)


def test_generation_loops_agree_with_torch() -> None:
    """Sampling, and attention in bf16, take the compiled loops where there is a compiler; attention in fp32 never."""
    query, key, value, lens = _attention_problem()
    fast = decode_attention(query, key, value, lens, scale=0.25)
    slow = decode_attention(query.float(), key.float(), value.float(), lens, scale=0.25)
    torch.testing.assert_close(fast.float(), slow, rtol=1e-2, atol=1e-2)
    generator = torch.Generator().manual_seed(1)
    distinct = torch.stack([torch.randperm(200, generator=generator) for _ in range(40)])  # ties have no order
    logits = (distinct / 16).bfloat16()
    options = {
        "temperature_B": torch.tensor([0.0, 1.0, 0.7, 1.3]).repeat(10),
        "top_p_B": torch.tensor([1.0, 0.9, 0.8, 0.95]).repeat(10),  # without top-p they go through ids in other orders
        "uniform_B": torch.rand(40, dtype=torch.float64, generator=generator),
    }
    expected = _sample_rows_torch(logits.float(), **options)
    for given in (logits, logits.float()):
        for a, b in zip(sample_rows(given, **options), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampled_rows_follow_the_distribution(dtype: torch.dtype, top_p: float) -> None:
    count = 4000
    logits = torch.tensor([0.5, 2.0, 1.0, -1.0]).to(dtype)
    _, tokens = sample_rows(
        logits.expand(count, 4).contiguous(),
        temperature_B=torch.full((count,), 0.5),
        top_p_B=torch.full((count,), top_p),
        uniform_B=torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    )
    expected = torch.softmax(logits.float() / 0.5, -1)
    if top_p < 1:
        expected = torch.tensor([0.0, 1.0, 0.0, 0.0])  # the second alone holds more than 0.6
    torch.testing.assert_close(torch.bincount(tokens, minlength=4) / count, expected, rtol=0, atol=0.025)


def test_the_distance_to_the_targets_hidden_states_enters_the_loss_as_it_says(
    target: LoadedModel, store: TokenStore
) -> None:
    plain, pulled = _trainer(target, store), _trainer(target, store, replace(_TRAIN, feature=0.7))
    batch = plain.plan.at(0, num_slots=3)
    weights = LossWeights(l1=1.0, kl=0.0, ce=0.0)
    with torch.no_grad():
        difference = float(pulled.losses(batch, weights)[0] - plain.losses(batch, weights)[0])
        hidden = plain.drafter.forward_packed(
            batch.taps_BCF, batch.positions_BC, batch.anchor_ids_BA, batch.anchor_positions_BA, batch.visible_BAC
        )
    total = weight_sum = 0.0
    wanted_ND = batch.hidden_UD.float()[batch.teacher_row_N]
    for place, wanted_D in zip(batch.slot_N.tolist(), wanted_ND, strict=True):
        weight = float(plain.slot_weight_G[place % 3])
        total += weight * float((hidden.flatten(0, 2)[place] - wanted_D).pow(2).mean())
        weight_sum += weight
    expected = 0.7 * total / weight_sum / float(wanted_ND.pow(2).mean())
    assert abs(difference - expected) < 1e-4 * abs(expected)


def test_training_on_columns_is_a_function_of_seed_and_step(target: LoadedModel, store: TokenStore) -> None:
    settings = replace(_TRAIN, loss_columns=48, sequences=1, anchors=3)
    runs = [_train(_trainer(target, store, settings), 4) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != _train(_trainer(target, store, replace(settings, loss_columns=0)), 4)


def _asked(calls: list[str], name: str, switch: bool) -> bool:
    if switch and fused():
        calls.append(name)
        return True
    return False


def test_fused_layers_train_as_those_of_torch_do(
    target: LoadedModel, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and every gradient of one step in bfloat16; without the compiled loops, each layer made of operators."""
    calls: list[str] = []
    found: list[tuple[float, dict[str, Tensor]]] = []
    for switch in (True, False):
        for module, name in ((norm, "norm"), (mlp, "mlp"), (projections, "heads")):
            monkeypatch.setattr(module, "fused", partial(_asked, calls, name, switch))
        trainer = _trainer(
            target, store, dtype=torch.bfloat16, decoder=replace(target.config, num_layers=2, qk_norm=True)
        )
        loss, _ = trainer.losses(trainer.plan.at(0, num_slots=3), LossWeights(l1=0.5, kl=0.5, ce=0.2))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in trainer.parameters.items() if p.grad is not None}
        assert set(gradients) == set(trainer.parameters)
        found.append((float(loss.detach()), gradients))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert set(calls) == ({"norm", "mlp", "heads"} if fused() else set())
    (one, first), (other, second) = found
    assert one == pytest.approx(other, rel=0.01)
    for name, gradient in first.items():
        assert F.cosine_similarity(gradient.flatten(), second[name].flatten(), dim=0) > 0.99, name
