"""A real model through the whole expert path: split into 8 experts, two data-parallel ranks, drafting, many clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from tests.server.live import LiveServer, serve

from outrider import LLM, SamplingParams
from outrider.config import EngineArgs
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.launch import make_engine
from outrider.models.drafter_checkpoint import resolve_drafter
from outrider.models.source import DEFAULT_MODEL
from outrider.models.split_experts import split_experts
from outrider.server.config import ServerConfig
from outrider.train.prompts import TemplatedQuestions

NUM_CLIENTS = 32
MAX_TOKENS = 48


def ask(live: LiveServer, question: str) -> str:
    with live.http() as client:
        answer = client.post(
            "/v1/chat/completions",
            json={
                "model": "split",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            },
            timeout=900,
        )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.slow
@pytest.mark.real_model
def test_split_into_experts_over_two_ranks_answers_as_the_dense_model_on_one(tmp_path: Path) -> None:
    questions = list(islice(TemplatedQuestions(seed=5), NUM_CLIENTS))
    with LLM(
        DEFAULT_MODEL, dtype="float32", max_num_seqs=NUM_CLIENTS, max_model_len=512, draft_self_test=False
    ) as dense:
        outputs = dense.chat(
            [[{"role": "user", "content": question}] for question in questions],
            SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
            use_tqdm=False,
        )
        expected = dense.stats().spec
    split_experts(DEFAULT_MODEL, num_experts=8, output=tmp_path / "split")
    drafter = resolve_drafter("auto", DEFAULT_MODEL)
    assert drafter is not None
    engine = make_engine(
        EngineArgs(
            model=str(tmp_path / "split"),
            draft=str(drafter),
            data_parallel_size=2,
            enable_expert_parallel=True,
            dtype="float32",
            max_model_len=512,
            draft_self_test=False,
        )
    )
    client = AsyncEngine(engine, model_name="split")
    with serve(client, config=ServerConfig(port=0)) as live:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            texts = list(pool.map(lambda question: ask(live, question), questions))
        spec = client.stats().spec
        rank_tokens = [stats.generation_tokens_total for stats in client.rank_stats()]
    print(
        f"accepted length {expected.accepted_length:.3f} dense, {spec.accepted_length:.3f} split; {rank_tokens} tokens"
    )
    assert texts == [output.outputs[0].text for output in outputs]
    assert spec.accepted_length == pytest.approx(expected.accepted_length, rel=0.02)
    assert min(rank_tokens) > 0
