"""Every kind of drafter the loader takes: greedy text is the target's, and rounds are those of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import fixtures
from tests.engine.zoo import (
    Zoo,
    assert_same_but_for_ties,
    generate,
    greedy,
    on_every_back_end,
    random_prompt,
    tokens,
)
from tests.models.drafter_module import ModuleDrafter, load_for
from tests.reference_drafter import GreedyDrafter, ReferenceDrafter, ReferenceTarget, reference_loop

from outrider import SamplingParams
from outrider.outputs import RequestOutput

pytestmark = on_every_back_end

LENGTHS = (3, 29)
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def target(zoo: Zoo) -> ReferenceTarget:
    return ReferenceTarget(zoo.path("rand"))


@pytest.fixture(scope="module")
def plain(zoo: Zoo) -> list[RequestOutput]:
    return generate(zoo.llm("rand"), prompts(), greedy(MAX_TOKENS, logprobs=2, ignore_eos=True))


def prompts() -> list[list[int]]:
    return [random_prompt(length, seed=length) for length in LENGTHS]


def check(
    zoo: Zoo, path: Path, reference: GreedyDrafter, target: ReferenceTarget, plain: list[RequestOutput], gamma: int
) -> float:
    """Text against plain decoding, rounds against the loop; the accepted length."""
    llm = zoo.llm("rand", str(path), gamma)
    for expected, output in zip(plain, generate(llm, prompts(), greedy(MAX_TOKENS, ignore_eos=True)), strict=True):
        assert_same_but_for_ties(expected, output, path.name, tie=zoo.tie)
        if zoo.back_end != "torch":  # the loop is that of the models unquantised
            continue
        run = reference_loop(target, reference, output.prompt_token_ids, max_tokens=MAX_TOKENS, gamma=gamma)
        if run.token_ids == tokens(output):  # not parted at a tie
            assert output.spec.rounds == len(run.accepted)
            assert output.spec.accepted_length == run.accepted_length
    return llm.stats().spec.accepted_length


@pytest.mark.parametrize("changes", [
    {"markov_head_type": "gated"},
    {"markov_head_type": "rnn"},
    {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    {"confidence_head_with_markov": False},
    {"block_size": 3, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
], ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()))  # fmt: skip
def test_every_head_drafts_in_rounds_of_the_plain_loop(
    changes: dict[str, Any], zoo: Zoo, target: ReferenceTarget, plain: list[RequestOutput], tmp_path: Path
) -> None:
    path = fixtures.make_random_drafter(tmp_path / "drafter", **changes)
    check(zoo, path, ReferenceDrafter.load(path, target), target, plain, changes.get("block_size", 7))


def test_taps_of_the_embedding_and_the_last_layer(zoo: Zoo, plain: list[RequestOutput], tmp_path: Path) -> None:
    """Text only: transformers hands out the last layer behind the final norm, so the plain loop has no such tap."""
    path = fixtures.make_random_drafter(tmp_path / "drafter", target_layer_ids=[-1, 1, 3])
    llm = zoo.llm("rand", str(path))
    for expected, output in zip(plain, generate(llm, prompts(), greedy(MAX_TOKENS, ignore_eos=True)), strict=True):
        assert_same_but_for_ties(expected, output, "taps -1, 1, 3", tie=zoo.tie)
    assert llm.stats().spec.offered > 0


def speculators_config(**changes: object) -> dict[str, object]:
    flat = fixtures.drafter_config()
    shape_keys = ({*fixtures.target_config(), "layer_types"} - {"architectures", "dtype"}) & set(flat)
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": 7,
        "aux_hidden_state_layer_ids": [i + 1 for i in fixtures.TARGET_LAYER_IDS],
        "mask_token_id": fixtures.MASK_ID,
        "markov_rank": 16,
        "draft_vocab_size": fixtures.VOCAB,
        "transformer_layer_config": {key: flat[key] for key in shape_keys},
        **changes,
    }


@pytest.mark.parametrize("from_anchor", [True, False])
def test_reduced_vocabulary_and_unused_slot_0(
    from_anchor: bool, zoo: Zoo, target: ReferenceTarget, plain: list[RequestOutput], tmp_path: Path
) -> None:
    """Drafts come from the 32 even ids; a block whose slot 0 predicts nothing gives one draft fewer."""
    tensors = fixtures.random_drafter_tensors(fixtures.drafter_config(), seed=9)
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][::2]
    tensors["d2t"] = torch.arange(32)
    config = speculators_config(sample_from_anchor=from_anchor, draft_vocab_size=32)
    path = fixtures.write_checkpoint(tmp_path / "drafter", config, tensors)
    reference = ModuleDrafter(load_for(path, target))
    assert check(zoo, path, reference, target, plain, 7 if from_anchor else 6) >= 1.0


@pytest.mark.parametrize("from_anchor", [True, False])
def test_speculators_format_of_perfect_takes_the_rounds_of_perfect(from_anchor: bool, zoo: Zoo, tmp_path: Path) -> None:
    """A Markov-only drafter does not care which slot predicts; a shift by one slot would break the chain."""
    tensors = load_file(zoo.path("perfect") / "model.safetensors")
    path = fixtures.write_checkpoint(tmp_path / "drafter", speculators_config(sample_from_anchor=from_anchor), tensors)
    llm = zoo.llm("cycle", str(path))
    output = generate(llm, [fixtures.orbit_prompt(17)], greedy(1 + 8 * 7))[0]
    assert tokens(output) == fixtures.continuation(fixtures.orbit_prompt(17), 57)
    assert output.spec.rounds == (7 if from_anchor else 8)


def test_sampled_text_with_a_reduced_vocabulary_reproduces(zoo: Zoo, target: ReferenceTarget, tmp_path: Path) -> None:
    """Every request of a mixed batch equals its solo run where q lives on the draft's columns alone."""

    tensors = fixtures.random_drafter_tensors(fixtures.drafter_config(), seed=9)
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][1::2]
    tensors["d2t"] = torch.arange(32) + 1
    path = fixtures.write_checkpoint(tmp_path / "drafter", speculators_config(draft_vocab_size=32), tensors)
    llm = zoo.llm("rand", str(path), enable_prefix_caching=False)
    three = [random_prompt(length, seed=length) for length in (3, 16, 29)]
    params = [
        SamplingParams(seed=1, max_tokens=16, top_k=8),
        SamplingParams(seed=2, max_tokens=16, logit_bias={2: 5.0, 63: -100.0}),
        SamplingParams(seed=3, max_tokens=16, repetition_penalty=1.5),
    ]
    for prompt, p, output in zip(three, params, generate(llm, three, params), strict=True):
        assert tokens(output) == tokens(generate(llm, [prompt], p)[0])
