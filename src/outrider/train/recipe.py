"""From a target to a drafter: generate, initialise, train, measure, export, each step resumable.

Contract: everything lives in one run directory. ``data/`` holds what the target said, ``state.pt`` the trainer,
``run.json`` the settings and the seconds each phase took, ``drafter/`` the exported checkpoint. A run directory that
holds a run is only continued (``resume``), and only with the settings it was started with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.config import DrafterConfig, MarkovHeadType
from outrider.engine.quantization import quantised_target
from outrider.errors import ConfigError
from outrider.layers.attention.registry import get_attention_backend
from outrider.logger import get_logger
from outrider.models.drafter_card import Measurement
from outrider.models.dspark import DSparkDrafter
from outrider.models.source import LoadedModel, load_model
from outrider.models.weights import TORCH_DTYPES
from outrider.train.data import StoreShape, TokenStore
from outrider.train.evaluate import closed_loop
from outrider.train.export import SelfTestPlan, converted, export
from outrider.train.generate import ChatFrame, GenerationSettings, generate
from outrider.train.initialize import choose_draft_vocab, initialize
from outrider.train.progress import progress_bar
from outrider.train.prompts import FileQuestions, QuestionFilter, TemplatedQuestions, first_turns, read_excluded
from outrider.train.trainer import HeldOut, Trainer, TrainSettings, read_state

logger = get_logger(__name__)
_SELF_TEST_QUESTIONS, _SELF_TEST_TOKENS = 4, 32  # every start of an engine decodes them


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    num_speculative_tokens: int
    target_layer_ids: tuple[int, ...]
    init_layer_ids: tuple[int, ...]  # target layers the draft layers start from; one draft layer each
    markov_rank: int
    markov_head_type: MarkovHeadType
    draft_vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    model: str
    output: Path
    shape: DrafterShape
    generation: GenerationSettings
    generate_tokens: int  # rows of the store
    generate_minutes: float
    training: TrainSettings
    dtype: str  # of matmuls: bfloat16 or float32
    held_out: int  # sequences kept from training
    questions: tuple[Path, ...]  # asked before templated ones
    exclude_prompts: tuple[Path, ...]
    evaluate_prompts: Path | None
    evaluate_tokens: int
    checkpoint_every: int  # steps

    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with the run it continues, JSON-able. Limits of time and steps may differ."""
        training = asdict(self.training)
        for free in ("steps", "max_minutes"):
            training.pop(free)
        generation = asdict(self.generation)
        plain = {"model": self.model, "shape": asdict(self.shape), "generation": generation, "training": training}
        settings: dict[str, Any] = json.loads(json.dumps(plain))
        return settings


def evenly_spaced_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layer ids from 1 to num_layers - 3, as DSpark drafters tap them."""
    last = num_layers - 3
    if last < 1 or count < 1 or count > last:
        raise ConfigError(f"{count} tapped layers do not fit between 1 and num_layers - 3 = {last}")
    if count == 1:
        return (last,)
    return tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))


class Run:
    """One run directory and the phases that fill it."""

    def __init__(self, recipe: Recipe, *, resume: bool) -> None:
        self.recipe = recipe
        self.folder = recipe.output
        self.seconds: dict[str, float] = {"generate": 0.0, "train": 0.0}
        self.store_full = False
        path = recipe.evaluate_prompts  # read now: a file that cannot be read must not cost a whole run
        self.evaluation = first_turns(path, option="evaluate-prompts") if path is not None else []
        self._open(resume)

    def _open(self, resume: bool) -> None:
        path = self.folder / "run.json"
        if not path.exists():
            if resume:
                raise ConfigError(f"resume: {self.folder} holds no run to continue")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
            return
        if not resume:
            raise ConfigError(f"output: {self.folder} already holds a run; use --resume or another directory")
        saved = json.loads(path.read_text())
        saved["settings"]["generation"].setdefault("quantization", "none")  # runs from before there was a choice
        for part, values in self.recipe.settings().items():
            _require_same(saved["settings"][part], values, where=f"resume: {self.folder}", part=part)
        self.seconds, self.store_full = saved["seconds"], saved["store_full"]

    def _write(self) -> None:
        content = {
            "settings": self.recipe.settings(),
            "seconds": self.seconds,
            "store_full": self.store_full,
        }
        (self.folder / "run.json").write_text(json.dumps(content, indent=2) + "\n")

    def execute(self) -> dict[str, Any]:
        """All phases; returns the summary that the command prints."""
        store = self.data()
        loaded = load_model(self.recipe.model, dtype="float32")
        drafter = self._new_drafter(loaded, store)
        trainer = self._trainer(drafter, store)
        held_out = self._train(trainer)
        return self._export(loaded, drafter, store, trainer, held_out)

    # Phases.

    def data(self) -> TokenStore:
        """What the target said; generation goes on until its minutes are used up or the store is full."""
        recipe, folder = self.recipe, self.folder / "data"
        exists = (folder / "index.json").exists()
        minutes_left = recipe.generate_minutes - self.seconds["generate"] / 60
        if exists and (self.store_full or minutes_left <= 0):
            store = TokenStore.open(folder)
            logger.info("using %d answer tokens generated before", store.answer_tokens)
            return store
        quantization = recipe.generation.quantization
        # What is packed is loaded in float32, the only type that holds quantised files exactly.
        in_bf16 = quantization == "none" and recipe.dtype == "bfloat16"
        loaded = load_model(recipe.model, dtype="bfloat16" if in_bf16 else "float32")
        config = loaded.config
        shape = StoreShape(
            capacity=recipe.generate_tokens,
            tap_width=len(recipe.shape.target_layer_ids) * config.hidden_size,
            hidden_size=config.hidden_size,
        )
        store = TokenStore.open(folder) if exists else TokenStore.create(folder, shape)
        questions = QuestionFilter(read_excluded(recipe.exclude_prompts))
        for text in stored_questions(store, loaded):
            questions.admit(text)
        seed = recipe.generation.seed + len(store.spans)  # an interrupted run goes on with new questions
        began = time.monotonic()
        threads = torch.get_num_threads()
        try:
            target = quantised_target(loaded.model, quantization)
        finally:
            torch.set_num_threads(threads)  # sampling and the training that follows need all of them
        with progress_bar("generate", recipe.generate_tokens) as advance:

            def report(_tokens: int) -> None:
                advance(store.used, f"{store.answer_tokens} answer tokens")

            generate(
                target,
                loaded.tokenizer,
                store,
                replace(recipe.generation, seed=seed),
                tap_layer_ids=recipe.shape.target_layer_ids,
                texts=FileQuestions(recipe.questions, seed=seed),
                question_filter=questions,
                max_seconds=60 * minutes_left,
                report=report,
            )
        spent = time.monotonic() - began
        self.seconds["generate"] += spent
        self.store_full = spent < 60 * minutes_left  # it ended for want of room
        self._write()
        logger.info("generated %d answer tokens; questions refused: %s", store.answer_tokens, questions.refused)
        return store

    def _new_drafter(self, loaded: LoadedModel, store: TokenStore) -> DSparkDrafter:
        shape, target = self.recipe.shape, loaded.config
        size = min(shape.draft_vocab_size, target.vocab_size)
        if (self.folder / "state.pt").exists():  # chosen from the data of that time, which may have grown since
            state = read_state(self.folder / "state.pt")
            draft_ids, mask_token_id = state["draft_to_target"], state["mask_token_id"]
        else:
            draft_ids = choose_draft_vocab(store, loaded.tokenizer, vocab_size=target.vocab_size, size=size)
            mask_token_id = _unused_token(loaded, store)
        config = DrafterConfig(
            source_format="speculators" if size < target.vocab_size else "deepspec",
            decoder=replace(target, num_layers=len(shape.init_layer_ids), qk_norm=True),
            num_speculative_tokens=shape.num_speculative_tokens,
            sample_from_anchor=True,
            target_layer_ids=shape.target_layer_ids,
            num_target_layers=target.num_layers,
            mask_token_id=mask_token_id,
            markov_rank=shape.markov_rank,
            markov_head_type=shape.markov_head_type,
            enable_confidence_head=True,
            confidence_head_with_markov=shape.markov_rank > 0,
            draft_vocab_size=size,
        )
        head = loaded.model.lm_head.weight.detach()
        drafter = DSparkDrafter(
            config,
            embedding_VD=loaded.model.embed_tokens.weight,
            lm_head_VD=nn.Parameter(head[draft_ids], requires_grad=False),
            draft_to_target_V=draft_ids,
            backend=get_attention_backend("auto"),
        )
        initialize(drafter, loaded.model, store, layer_ids=shape.init_layer_ids)
        return drafter

    def _trainer(self, drafter: DSparkDrafter, store: TokenStore) -> Trainer:
        recipe = self.recipe
        if recipe.held_out >= len(store.spans):
            raise ConfigError(f"held_out={recipe.held_out} leaves nothing of {len(store.spans)} sequences to train on")
        cut = len(store.spans) - recipe.held_out
        dtype = TORCH_DTYPES["bfloat16" if recipe.dtype == "bfloat16" else "float32"]
        trainer = Trainer(
            drafter,
            store,
            recipe.training,
            train_spans=store.spans[:cut],
            held_out_spans=store.spans[cut:],
            dtype=dtype,
        )
        if (self.folder / "state.pt").exists():
            trainer.load_state(self.folder / "state.pt")
            logger.info("continuing at step %d", trainer.step)
        return trainer

    def _train(self, trainer: Trainer) -> HeldOut:
        settings = self.recipe.training
        smooth = 0.0
        with progress_bar("train", settings.steps) as advance:

            def on_step(loss: float, accepted: float) -> None:
                nonlocal smooth
                smooth = 0.98 * smooth + 0.02 * accepted if smooth else accepted
                advance(trainer.progress * settings.steps, f"step {trainer.step} loss {loss:.3f} accept {smooth:.3f}")

            def checkpoint() -> None:
                trainer.save_state(self.folder / "state.pt")
                self.seconds["train"] = trainer.elapsed
                self._write()
                logger.info(
                    "step %d (%.0f %%), held out: %s",
                    trainer.step,
                    100 * trainer.progress,
                    trainer.evaluate().describe(),
                )

            every = self.recipe.checkpoint_every
            trainer.run(until_step=settings.steps, on_step=on_step, every=every, checkpoint=checkpoint)
        trainer.save_state(self.folder / "state.pt")
        self.seconds["train"] = trainer.elapsed
        self._write()
        held_out = trainer.evaluate()
        logger.info("trained %d steps in %.0f s, held out: %s", trainer.step, trainer.elapsed, held_out.describe())
        return held_out

    def _export(
        self, loaded: LoadedModel, drafter: DSparkDrafter, store: TokenStore, trainer: Trainer, held_out: HeldOut
    ) -> dict[str, Any]:
        recipe, frame = self.recipe, ChatFrame.of(loaded.tokenizer)
        shipped = converted(drafter, torch.bfloat16)
        measured = converted(shipped, torch.float32)
        texts = TemplatedQuestions(seed=recipe.training.seed + 1)
        plan = SelfTestPlan(
            prompts=tuple(_framed(frame, loaded, next(texts)) for _ in range(_SELF_TEST_QUESTIONS)),
            max_tokens=_SELF_TEST_TOKENS,
            share=0.75,
        )
        selftest = plan.result(self._closed_loop(loaded, measured, plan.prompts, 0.0, plan.max_tokens))
        measurements = self._measure(loaded, measured, frame)
        training = {
            "answer_tokens": store.answer_tokens,
            "answers": len(store.spans),
            "answer_temperatures": list(recipe.generation.temperatures),
            "answer_quantization": recipe.generation.quantization,
            "steps": trainer.step,
            "minutes_generating": round(self.seconds["generate"] / 60, 1),
            "minutes_training": round(self.seconds["train"] / 60, 1),
            "threads": torch.get_num_threads(),
            "held_out_accepted_length": {
                "temperature_0": round(held_out.length_greedy, 3),
                "temperature_1": round(held_out.length_sampled, 3),
            },
            **recipe.settings()["training"],
            "init_layer_ids": list(recipe.shape.init_layer_ids),
        }
        folder = self.folder / "drafter"
        name = recipe.model
        export(drafter, folder, target=name, measurements=measurements, selftest=selftest, training=training)
        return {
            "drafter": str(folder),
            "steps": trainer.step,
            "seconds": self.seconds,
            "held_out": asdict(held_out),
            "measurements": [asdict(measurement) for measurement in measurements],
            "selftest_accepted_length": selftest.accepted_length,
        }

    def _measure(self, loaded: LoadedModel, drafter: DSparkDrafter, frame: ChatFrame) -> list[Measurement]:
        path = self.recipe.evaluate_prompts
        if path is None:
            return []
        prompts = [_framed(frame, loaded, text) for text in self.evaluation]
        return [
            Measurement(
                data=path.stem,
                prompts=len(prompts),
                temperature=temperature,
                max_tokens=self.recipe.evaluate_tokens,
                num_speculative_tokens=drafter.config.num_speculative_tokens,
                accepted_length=round(
                    self._closed_loop(loaded, drafter, prompts, temperature, self.recipe.evaluate_tokens), 4
                ),
            )
            for temperature in (0.0, 1.0)
        ]

    def _closed_loop(
        self,
        loaded: LoadedModel,
        drafter: DSparkDrafter,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        max_tokens: int,
    ) -> float:
        totals = closed_loop(
            loaded.model,
            drafter,
            prompts,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_ids=loaded.tokenizer.eos_token_ids,
            seed=self.recipe.training.seed,
        )
        return totals.accepted_length


def _require_same(saved: Any, wanted: Any, *, where: str, part: str) -> None:
    """Name the setting that differs, not all that lie around it."""
    if isinstance(saved, dict) and isinstance(wanted, dict) and saved.keys() == wanted.keys():
        for key, value in wanted.items():
            _require_same(saved[key], value, where=where, part=f"{part}.{key}")
    elif saved != wanted:
        raise ConfigError(f"{where} was started with {part}={saved!r}, not {wanted!r}; give it as it was")


def stored_questions(store: TokenStore, loaded: LoadedModel) -> Iterator[str]:
    """The questions of all sequences of ``store``."""
    frame = ChatFrame.of(loaded.tokenizer)
    for span in store.spans:
        answer = int(store.answer_C[span.start : span.stop].argmax())
        question = store.tokens_C[span.start + len(frame.head) : span.start + answer - len(frame.tail)]
        yield loaded.tokenizer.decode(question.tolist(), skip_special_tokens=False)


def _framed(frame: ChatFrame, loaded: LoadedModel, question: str) -> tuple[int, ...]:
    return (*frame.head, *loaded.tokenizer.encode(question, add_special_tokens=False), *frame.tail)


def _unused_token(loaded: LoadedModel, store: TokenStore) -> int:
    """The special token that the data never holds (the highest id of them), else the rarest token."""
    counts = torch.bincount(store.tokens_C[: store.used].long(), minlength=loaded.config.vocab_size)
    ends = loaded.tokenizer.eos_token_ids
    spare = [i for i in sorted(loaded.tokenizer.special_token_ids) if not counts[i] and i not in ends]
    return spare[-1] if spare else int(counts.argmin())
