"""The black-box cases: small models with known answers, run through ``LLM``. Case ids as in the design."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import fixtures
from tests.engine.zoo import (
    DRAFT_PROBABILITIES,
    TARGET_PROBABILITIES,
    Config,
    Zoo,
    assert_same_but_for_ties,
    edited,
    generate,
    greedy,
    on_every_back_end,
    random_prompt,
    run_to_end,
    tokens,
)
from tests.reference_drafter import ReferenceDrafter, ReferenceTarget, reference_loop
from tests.sampling.helpers import chi_square_p

from outrider import LLM, SamplingParams
from outrider.outputs import RequestOutput, SpecCounters

LENGTHS = (1, 15, 16, 17, 100)  # around the page of 16
DRAFTERS = ("perfect", "wrong", "half", "random")
GAMMAS = tuple(range(1, fixtures.GAMMA + 1))

# ------------------------------------------------------------------------------- T1: greedy output is the target's


def t1_prompts(target: str) -> list[list[int]]:
    """Eight, of which the first five have the lengths of the case."""
    lengths = (*LENGTHS, 16, 33, 100)
    if target == "cycle":
        return [fixtures.orbit_prompt(n, first_generated_index=7 * i) for i, n in enumerate(lengths)]
    return [random_prompt(n, seed=i) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def references(zoo: Zoo) -> dict[str, list[RequestOutput]]:
    """Each prompt of T1 alone, without drafting, with the top-2 gap at each position."""
    found = {}
    for target in ("cycle", "rand"):
        llm = zoo.llm(target)
        params = greedy(logprobs=2, ignore_eos=True)
        found[target] = [generate(llm, [prompt], params)[0] for prompt in t1_prompts(target)]
    return found


@on_every_back_end
def test_t1_the_reference_itself_follows_the_map(references: dict[str, list[RequestOutput]]) -> None:
    for prompt, output in zip(t1_prompts("cycle"), references["cycle"], strict=True):
        assert tokens(output) == fixtures.continuation(prompt, 64)


def check_t1(
    zoo: Zoo,
    references: Sequence[RequestOutput],
    *,
    target: str,
    drafter: str,
    gamma: int,
    batches: Sequence[Sequence[int]],
) -> None:
    llm = zoo.llm(target, drafter, gamma)
    prompts = t1_prompts(target)
    for batch in batches:
        outputs = generate(llm, [prompts[i] for i in batch], greedy(ignore_eos=True))
        for i, output in zip(batch, outputs, strict=True):
            what = f"{target}, {drafter}, gamma {gamma}, prompt of {len(prompts[i])} in a batch of {len(batch)}"
            if target == "cycle":
                assert tokens(output) == tokens(references[i]), what
            else:
                assert_same_but_for_ties(references[i], output, what, tie=zoo.tie)


@on_every_back_end
@pytest.mark.parametrize("gamma", GAMMAS)
def test_t1_cycle(gamma: int, zoo: Zoo, references: dict[str, list[RequestOutput]]) -> None:
    """Every depth, each drafter at some depth; a batch of 8, a batch of 3 and one length alone."""
    for drafter in (DRAFTERS[gamma % 4], "half") if gamma == fixtures.GAMMA else (DRAFTERS[gamma % 4],):
        batches = [range(8), (0, 2, 4)] if gamma % 2 else [range(8), [gamma % len(LENGTHS)]]
        check_t1(zoo, references["cycle"], target="cycle", drafter=drafter, gamma=gamma, batches=batches)


@on_every_back_end
@pytest.mark.parametrize("gamma", GAMMAS)
def test_t1_rand(gamma: int, zoo: Zoo, references: dict[str, list[RequestOutput]]) -> None:
    batches = [range(8)] if gamma % 2 else [(1, 3, 4), [gamma % len(LENGTHS)]]
    check_t1(zoo, references["rand"], target="rand", drafter="random", gamma=gamma, batches=batches)


@on_every_back_end
@pytest.mark.slow
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("target", ["cycle", "rand"])
def test_t1_full_grid(
    target: str, drafter: str, gamma: int, zoo: Zoo, references: dict[str, list[RequestOutput]]
) -> None:
    batches: list[Sequence[int]] = [[i] for i in range(len(LENGTHS))]
    batches += [(0, 2, 4), (1, 3, 4), range(8)]
    check_t1(zoo, references[target], target=target, drafter=drafter, gamma=gamma, batches=batches)


# --------------------------------------------------------------------------------- T2: as many rounds as computed


@on_every_back_end
@pytest.mark.parametrize(("drafter", "gamma", "rounds"), [
    ("perfect", 1, 32), ("perfect", 3, 16), ("perfect", 7, 8), ("half", 7, 16), ("wrong", 7, 64),
])  # fmt: skip
def test_t2_rounds_whatever_the_prompt_length(drafter: str, gamma: int, rounds: int, zoo: Zoo) -> None:
    prompts = [fixtures.orbit_prompt(length) for length in LENGTHS]
    for prompt, output in zip(prompts, generate(zoo.llm("cycle", drafter, gamma), prompts, greedy(65)), strict=True):
        assert tokens(output) == fixtures.continuation(prompt, 65)
        assert output.spec.rounds == rounds, len(prompt)
        assert output.spec.accepted_length == 64 / rounds


@on_every_back_end
def test_t2_context_drafter_takes_the_rounds_of_the_plain_loop(zoo: Zoo) -> None:
    """This drafter knows nothing but the tapped features: a shift by a slot, a layer or a position fails here."""
    target = ReferenceTarget(zoo.path("layered"))
    reference = ReferenceDrafter.load(zoo.path("context"), target)
    prompts = [fixtures.orbit_prompt(length, first_generated_index=21) for length in (8, 40, 200)]
    outputs = generate(zoo.llm("layered", "context", 7), prompts, greedy(65))
    for prompt, output in zip(prompts, outputs, strict=True):
        run = reference_loop(target, reference, prompt, max_tokens=65, gamma=7)
        assert tokens(output) == run.token_ids
        assert output.spec.rounds == len(run.accepted) == 8
        assert output.spec.accepted_length == run.accepted_length == 8


# ----------------------------------------------------------------------- T5: sampled output has the target's law


def t5_p_values(llm: LLM, params: dict[str, Any], expected: Sequence[float], num_sequences: int) -> list[float]:
    """Chi-square of each of the first 4 positions and of the joints of 1 and 2 and of 2 and 3.

    The first position comes from prefill; those behind it from rounds of 3 drafts.
    """
    ids = tuple(TARGET_PROBABILITIES)
    n = 200
    requests = [
        SamplingParams(n=n, seed=first_seed, max_tokens=4, ignore_eos=True, **params)
        for first_seed in range(0, num_sequences, n)
    ]
    outputs = generate(llm, [[1, 2, 3]] * len(requests), requests)
    sequences = [completion.token_ids for output in outputs for completion in output.outputs]
    assert len(sequences) == num_sequences
    values = [
        chi_square_p(
            [sum(s[position] == i for s in sequences) for i in range(fixtures.VOCAB)],
            [dict(zip(ids, expected, strict=True)).get(i, 0.0) for i in range(fixtures.VOCAB)],
        )
        for position in range(4)
    ]
    cells = list(itertools.product(range(3), repeat=2))
    for first in (0, 1):
        pairs = [s[first : first + 2] for s in sequences]
        counts = [pairs.count((ids[a], ids[b])) for a, b in cells]
        values.append(chi_square_p(counts, [expected[a] * expected[b] for a, b in cells]))
    return values


def tempered(temperature: float) -> list[float]:
    masses = [p ** (1 / temperature) for p in TARGET_PROBABILITIES.values()]
    return [mass / sum(masses) for mass in masses]


T5_CASES: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "plain": ({"temperature": 1.0}, tuple(TARGET_PROBABILITIES.values())),
    "top_p": ({"temperature": 1.0, "top_p": 0.85}, (0.0, 2 / 3, 1 / 3)),
    "top_k": ({"temperature": 1.0, "top_k": 2}, (0.0, 2 / 3, 1 / 3)),
    "temperature": ({"temperature": 0.7}, tempered(0.7)),
}


@pytest.mark.parametrize("zoo", ["torch", "int8"], indirect=True)
@pytest.mark.parametrize("num_sequences", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", T5_CASES)
def test_t5_distribution(name: str, num_sequences: int, zoo: Zoo) -> None:
    params, expected = T5_CASES[name]
    llm = zoo.llm("fixed", "fixed-drafter", 3, max_num_seqs=500, max_num_batched_tokens=4096)
    assert min(t5_p_values(llm, params, expected, num_sequences)) > 1e-3
    rate = llm.stats().spec.acceptance_rate
    if name == "plain":  # the first draft of a round passes with the overlap of p and q
        overlap = sum(
            min(p, q) for p, q in zip(TARGET_PROBABILITIES.values(), DRAFT_PROBABILITIES.values(), strict=True)
        )
        offered, accepted = llm.stats().spec.per_position[0]
        assert accepted / offered == pytest.approx(overlap, abs=4 * (0.25 / offered) ** 0.5)
    assert 0.0 < rate < 1.0


# ------------------------------------------------------------------------------- T7: arrivals, mixtures and aborts

T7_LENGTHS = (1, 130, 16, 47, 3, 88, 17, 64)
T7_MAX_TOKENS = (40, 7, 33, 1, 25, 12, 38, 19)
T7_ABORTED = (2, 6)  # at the sixth step after they came


def t7_requests() -> list[tuple[str, list[int], SamplingParams]]:
    return [
        (
            f"r{i}",
            random_prompt(length, seed=i),
            SamplingParams(temperature=i % 2, seed=100 + i, max_tokens=max_tokens, ignore_eos=True),
        )
        for i, (length, max_tokens) in enumerate(zip(T7_LENGTHS, T7_MAX_TOKENS, strict=True))
    ]


@on_every_back_end
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "in reverse order"])
def test_t7_arrivals_one_per_round_with_aborts(reverse: bool, zoo: Zoo) -> None:
    llm = zoo.llm("rand", "random", 7, enable_prefix_caching=False)
    requests = t7_requests()[:: -1 if reverse else 1]
    aborted = {f"r{i}" for i in T7_ABORTED}
    core, free = llm.core, llm.stats().kv_blocks_free
    finished: dict[str, RequestOutput] = {}
    arrivals = iter(requests)
    age: dict[str, int] = {}
    while core.has_unfinished or len(age) < len(requests):
        for request_id, prompt, params in itertools.islice(arrivals, 1):
            core.add_request(request_id=request_id, prompt=None, prompt_token_ids=prompt, params=params)
            age[request_id] = 0
        finished |= {output.request_id: output for output in core.step() if output.finished}
        for request_id in age:
            age[request_id] += 1
            if age[request_id] == 6 and request_id in aborted:
                last = core.abort(request_id)
                assert last is not None
                assert last.outputs[0].finish_reason == "abort"
    assert set(finished) == {request_id for request_id, _, _ in requests} - aborted
    assert llm.stats().kv_blocks_free == free
    for request_id, prompt, params in requests:
        if request_id in finished:
            solo = generate(llm, [prompt], params)[0]
            assert tokens(finished[request_id]) == tokens(solo), request_id
            assert finished[request_id].spec == solo.spec
            assert finished[request_id].outputs[0].finish_reason == "length"
    assert llm.stats().kv_blocks_free == free


# ---------------------------------------------------------------------------------- T12: counters and logprobs


def check_counters(spec: SpecCounters) -> None:
    assert spec.offered == sum(offered for offered, _ in spec.per_position)
    assert spec.accepted == sum(accepted for _, accepted in spec.per_position)
    assert all(offered >= accepted for offered, accepted in spec.per_position)
    for column in zip(*spec.per_position, strict=True):
        assert list(column) == sorted(column, reverse=True)


@on_every_back_end
def test_t12_counters_and_logprobs_of_half(zoo: Zoo) -> None:
    prompt, params = fixtures.orbit_prompt(16), greedy(65, logprobs=2)
    llm = zoo.llm("cycle", "half", 7)
    output = generate(llm, [prompt], params)[0]
    reference = generate(zoo.llm("cycle"), [prompt], params)[0]
    spec = output.spec
    check_counters(spec)
    assert spec == llm.stats().spec
    assert len(tokens(output)) == 65 == 1 + spec.emitted == llm.stats().generation_tokens_total
    assert llm.stats().prompt_tokens_total == 16
    assert (spec.rounds, spec.emitted, spec.accepted_length) == (16, 64, 4.0)
    assert spec.acceptance_rate == pytest.approx(3 / 7)
    assert spec.per_position == ((16, 16), (16, 16), (16, 16), (16, 0), (16, 0), (16, 0), (16, 0))
    found, expected = output.outputs[0].logprobs, reference.outputs[0].logprobs
    assert found is not None
    assert expected is not None
    assert len(found) == len(expected) == 65
    for token_id, a, b in zip(tokens(output), found, expected, strict=True):
        assert a.sampled.token_id == b.sampled.token_id == token_id
        assert a.sampled.logprob == pytest.approx(b.sampled.logprob, abs=1e-4)
        assert a.sampled.rank == 1
        assert [entry.rank for entry in a.top] == [1, 2]
        assert [entry.logprob for entry in a.top] == pytest.approx([entry.logprob for entry in b.top], abs=1e-4)
        assert a.top[0].token_id == b.top[0].token_id


@on_every_back_end
def test_t12_confidence_cuts_at_two_drafts(zoo: Zoo, tmp_path: Path) -> None:
    def constant_confidence(config: Config, tensors: fixtures.TensorDict) -> None:
        tensors["confidence_head.proj.weight"].zero_()
        tensors["confidence_head.proj.bias"] = torch.tensor([0.8]).logit()  # survival .8, .64, .512, ...

    draft = edited(tmp_path / "drafter", zoo.path("perfect"), constant_confidence)
    llm = zoo.llm("cycle", draft, 7, draft_confidence_threshold=0.6)
    prompt = fixtures.orbit_prompt(16)
    output = generate(llm, [prompt], greedy(64))[0]
    assert tokens(output) == fixtures.continuation(prompt, 64)
    check_counters(output.spec)
    assert (output.spec.emitted, output.spec.rounds, output.spec.accepted_length) == (63, 21, 3.0)
    assert output.spec.per_position == ((21, 21), (21, 21))
    assert output.spec.acceptance_rate == 1.0


@on_every_back_end
def test_stepping_the_core_by_hand_gives_the_same(zoo: Zoo) -> None:
    """``LLM.core`` is public: growing snapshots, the last of which is finished."""
    core = zoo.llm("cycle", "perfect", 7).core
    prompt = fixtures.orbit_prompt(5)
    core.add_request(request_id="a", prompt=None, prompt_token_ids=prompt, params=greedy(20))
    lengths = [len(tokens(core.step()[0])) for _ in range(3)]
    assert lengths == [1, 9, 17]
    assert tokens(run_to_end(core)["a"]) == fixtures.continuation(prompt, 20)
