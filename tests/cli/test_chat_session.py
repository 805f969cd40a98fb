"""The chat terminal's core, without a terminal."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.server.fake_engine import ByteTokenizer, FakeEngine

from outrider.cli.chat import chat_loop
from outrider.cli.chat_session import ChatSession, ChatTotals
from outrider.errors import InvalidRequestError
from outrider.outputs import CompletionOutput, RequestOutput, RequestTiming, SpecCounters
from outrider.sampling_params import SamplingParams


class Terminal:
    """Typed lines in, written text out. A typed exception is raised where it stands."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines: Iterator[str | type[BaseException]] = iter(lines)
        self.text = ""

    def read(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    def write(self, text: str) -> None:
        self.text += text


def converse(engine: FakeEngine, *lines: str | type[BaseException], max_tokens: int = 4, system: str = "") -> Chat:
    terminal = Terminal(*lines)
    session = ChatSession(engine, params=SamplingParams(max_tokens=max_tokens), system=system, write=terminal.write)
    with asyncio.Runner() as runner:
        chat_loop(session, read_line=terminal.read, run=runner.run)
    return Chat(session, terminal)


class Chat:
    def __init__(self, session: ChatSession, terminal: Terminal) -> None:
        self.session, self.terminal = session, terminal


def test_answers_stream_and_become_history() -> None:
    engine = FakeEngine()
    chat = converse(engine, "hi", "", "and?", system="be kind")
    assert chat.terminal.text == ("syst\n[cut: the limit of tokens was reached]\n" * 2) + "\n"
    assert [message["role"] for message in chat.session.history] == ["user", "assistant"] * 2
    assert engine.seen_prompts[1][0] == "system:be kind\nuser:hi\nassistant:syst\nuser:and?\nassistant:"


def test_commands() -> None:
    engine = FakeEngine()
    chat = converse(
        engine, "hi", "/stats", "/reset", "/system be brief", "hi", "/system", "/nope", "/help", "/exit", "x"
    )
    assert [prompt for prompt, _ in engine.seen_prompts] == [
        "user:hi\nassistant:",
        "system:be brief\nuser:hi\nassistant:",
    ]
    assert chat.session.history == []
    for words in ("turns 1, prompt tokens 18, answer tokens 4", "[conversation forgotten]", "[system text removed]",
                  "unknown command /nope", "/stats ", "/system TEXT"):  # fmt: skip
        assert words in chat.terminal.text


def test_oldest_turns_are_dropped_with_a_notice() -> None:
    engine = FakeEngine(max_model_len=72)
    chat = converse(engine, "a" * 20, "b" * 20, "c", max_tokens=8)
    prompts = [prompt or "" for prompt, _ in engine.seen_prompts]
    assert [len(prompt) for prompt in prompts] == [36, 36, 62]
    assert "aaa" not in prompts[1]
    assert "[context of 72 tokens is full: the 1 oldest turns were dropped]" in chat.terminal.text
    assert chat.terminal.text.count("dropped") == 1
    assert [message["content"][:1] for message in chat.session.history] == ["b", "u", "c", "u"]


def test_a_message_too_long_for_the_context_is_refused_and_forgotten() -> None:
    engine = FakeEngine(max_model_len=64)
    chat = converse(engine, "a", "x" * 100, "b")
    assert "116 tokens; at most 63" in chat.terminal.text
    assert all("x" * 100 not in (prompt or "") for prompt, _ in engine.seen_prompts)
    assert [message["content"] for message in chat.session.history if message["role"] == "user"] == ["b"]


def test_interrupt_stops_the_answer_and_keeps_its_beginning(restore_sigint: None) -> None:
    engine = FakeEngine(step_s=0.01)
    terminal = Terminal("hi", KeyboardInterrupt, "/exit")
    session = ChatSession(engine, params=SamplingParams(max_tokens=200), system="", write=terminal.write)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_when(written: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not written() and time.monotonic() < deadline:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt_when, args=(lambda: "user" in terminal.text,))
    thread.start()
    with asyncio.Runner() as runner:
        chat_loop(session, read_line=terminal.read, run=runner.run)
    thread.join()
    answer = session.history[1]["content"]
    assert answer.startswith("user")
    assert terminal.text == f"{answer}\n[stopped]\n\n[/exit or Ctrl-D leaves]\n"
    assert list(engine.ended.values()) == ["abort"]
    assert session.totals.completion_tokens == len(answer) < 200


@pytest.fixture
def restore_sigint() -> Iterator[None]:
    """Background jobs start with SIGINT ignored; a terminal's do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_engine_that_dies_ends_the_conversation() -> None:
    engine = FakeEngine()
    engine.crash_next = True
    chat = converse(engine, "hi", "never read")
    assert len(engine.seen_prompts) == 1
    assert chat.session.history == []


def test_a_model_without_a_template_is_refused() -> None:
    class Plain(ByteTokenizer):
        has_chat_template = False

    engine = FakeEngine()
    engine.tokenizer = Plain()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatSession(engine, params=SamplingParams(), system="", write=print)


def test_totals_add_up_over_answers() -> None:
    completion = CompletionOutput(
        index=0, text="abc", token_ids=(1, 2, 3), logprobs=None, finish_reason="stop", stop_reason=None
    )
    output = RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=(1,),
        outputs=(completion,),
        finished=True,
        timing=RequestTiming(ttft_s=1.0, e2e_s=2.0),
        spec=SpecCounters(rounds=1, offered=2, accepted=1, emitted=2, per_position=((1, 1), (1, 0))),
    )
    totals = ChatTotals()
    totals.add(output)
    totals.add(output)
    assert totals.spec == SpecCounters(rounds=2, offered=4, accepted=2, emitted=4, per_position=((2, 2), (2, 0)))
    assert (totals.turns, totals.completion_tokens, totals.tokens_per_s) == (2, 6, 2.0)
