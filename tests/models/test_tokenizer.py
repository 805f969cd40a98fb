"""The tokenizer wrapper, tokenizers built from GGUF metadata, and the incremental detokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import fixtures
from tests.models.gguf_writing import byte_alphabet
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from outrider.errors import CheckpointError, InvalidRequestError
from outrider.models.tokenizer import IncrementalDetokenizer, Tokenizer

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ã ©", "1 2"]
EOS, PAD, TOOL = "<|end|>", "<|pad|>", "<tool>"
TOKENS = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES), EOS, PAD, TOOL]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": TOKENS.index(EOS),
    "tokenizer.ggml.padding_token_id": TOKENS.index(PAD),
    "tokenizer.chat_template": "{{ messages[0]['content'] + eos_token }}",
}
TEXTS = [
    "hello world",
    " hello",
    "héé",
    "日本語 🙂",
    "a\n\n b\t",
    "it's 1212 o'clock",
    f"x{EOS}y{TOOL} z",
    "",
    "\x00\x7f",
]


def from_metadata(**changes: Any) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer.from_gguf({**METADATA, **changed}, eos_token_ids=(TOKENS.index(EOS),))


def sentencepiece_like() -> Tokenizer:
    """Metaspace with byte fallback: it drops the space at the very start of a text, which a window must not repeat."""
    vocabulary = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for piece in ("▁", "h", "i", "▁hi", "▁you", "y", "o", "u"):
        vocabulary[piece] = len(vocabulary)
    fast = FastTokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>"), eos_token_ids=(len(vocabulary),))


BYTE_LEVEL, SENTENCEPIECE = from_metadata(), sentencepiece_like()


# ------------------------------------------------------------------------------------------------ from metadata


def test_byte_level_bpe_as_built_by_hand() -> None:
    merges = [(merge.split(" ")[0], merge.split(" ")[1]) for merge in MERGES]
    expected = FastTokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    expected.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (EOS, PAD)])
    expected.add_tokens([AddedToken(TOOL, normalized=False)])
    for text in TEXTS:
        assert BYTE_LEVEL.encode(text, add_special_tokens=True) == expected.encode(text).ids
    assert BYTE_LEVEL.encode("hello", add_special_tokens=False) == [TOKENS.index("hello")]


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(pre: str, text: str) -> None:
    tokenizer = from_metadata(pre=pre)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace(EOS, "")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_equal_to_transformers_over_the_same_parts(pre: str, tmp_path: Path) -> None:
    """Ids, texts, special tokens and templates, without transformers and with it; a plain token has a role here."""
    roles = {"bos_token_id": TOKENS.index("hello"), "add_bos_token": True, "pre": pre}
    ours = from_metadata(**roles)
    ours.save(tmp_path)
    theirs = Tokenizer.from_directory(tmp_path, eos_token_ids=ours.eos_token_ids)
    assert ours.special_token_ids == theirs.special_token_ids == {TOKENS.index(token) for token in (EOS, PAD, "hello")}
    assert ours.vocab_size == theirs.vocab_size
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
            assert [ours.id_to_text(i) for i in ids] == [theirs.id_to_text(i) for i in ids]


TEMPLATES = {
    "loop": "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}\n  {{ m.role }}: {{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token }}>{% endif %}",
    "json": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ '<&é' | tojson }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}{{ eos_token }}",
    "absent": "{{ messages[0].name is defined }}{{ tools is none }}{{ documents }}{{ pad_token }}{{ unk_token }}",
    "dict": "{{ dict(a=1)['a'] }}{{ range(3) | list }}{{ strftime_now('%') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_with_transformers(name: str, tmp_path: Path) -> None:
    metadata = {**METADATA, "tokenizer.chat_template": TEMPLATES[name]}
    ours = Tokenizer.from_gguf(metadata, eos_token_ids=())
    ours.save(tmp_path)
    theirs = Tokenizer.from_directory(tmp_path, eos_token_ids=())
    chat = [{"role": role, "content": f"{role} & <é>", "name": None} for role in ("system", "user", "assistant")]
    for prompt in (True, False):
        text = ours.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt)
        assert text


def test_a_gguf_tokenizer_does_not_import_transformers() -> None:
    """Its import costs a second of every start."""
    code = "import sys, outrider.cli.generate, outrider.models.tokenizer_gguf; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pre_tokenizers_differ_where_they_should() -> None:
    """Digits: single for smollm and qwen2, up to three for llama-bpe, all together for gpt-2. "1 2" is a merge."""
    merged = TOKENS.index("12")
    assert from_metadata(pre="gpt-2").encode("1212", add_special_tokens=False) == [merged, merged]
    assert from_metadata(pre="llama-bpe").encode("121", add_special_tokens=False) == [merged, TOKENS.index("1")]
    for pre in ("smollm", "qwen2"):
        assert merged not in from_metadata(pre=pre).encode("1212", add_special_tokens=False)
    decomposed = "e\u0301"
    assert from_metadata(pre="qwen2").encode(decomposed, add_special_tokens=False) == [TOKENS.index("Ã©")]
    assert len(from_metadata(pre="smollm").encode(decomposed, add_special_tokens=False)) == 3


def test_special_tokens_and_sizes() -> None:
    assert BYTE_LEVEL.vocab_size == len(TOKENS)
    assert BYTE_LEVEL.special_token_ids == {TOKENS.index(EOS), TOKENS.index(PAD)}
    assert BYTE_LEVEL.eos_token_ids == (TOKENS.index(EOS),)
    assert BYTE_LEVEL.token_to_id("hello") == TOKENS.index("hello")
    assert BYTE_LEVEL.token_to_id("absent") is None
    assert BYTE_LEVEL.id_to_token(TOKENS.index("Ġwo")) == "Ġwo"
    assert BYTE_LEVEL.id_to_token(len(TOKENS)) == ""
    assert BYTE_LEVEL.id_to_text(TOKENS.index("Ġwo")) == " wo"
    assert BYTE_LEVEL.id_to_text(TOKENS.index(EOS)) == EOS
    assert BYTE_LEVEL.id_to_text(TOKENS.index("Ã")) == "\ufffd"


def test_bos_is_added_where_the_file_says_so() -> None:
    tokenizer = from_metadata(add_bos_token=True, bos_token_id=TOKENS.index(PAD))
    hello = TOKENS.index("hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [TOKENS.index(PAD), hello]
    assert tokenizer.encode("hello", add_special_tokens=False) == [hello]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"model='llama'.*supported: model gpt2"),
        ({"pre": "chatglm"}, r"pre='chatglm'.*smollm, qwen2, llama-bpe"),
        ({"token_type": [1]}, r"267 tokens but 1 token types"),
        ({"merges": ["h q"]}, r"GGUF tokenizer: .*hq"),
        ({"merges": ["hello"]}, r"merge 'hello'"),
        ({"tokens": 3}, r"tokenizer\.ggml\.tokens must be an array of str"),
        ({"token_type": ["1"] * len(TOKENS)}, r"token_type must be an array of int"),
        ({"merges": [7]}, r"merges must be an array of str"),
        ({"eos_token_id": "2"}, r"eos_token_id=2 must lie in"),
        ({"eos_token_id": 9999}, r"eos_token_id=9999 must lie in 0\.\.266"),
        ({"add_bos_token": True, "bos_token_id": 9999}, r"bos_token_id=9999"),
        ({"add_bos_token": True}, r"add_bos_token.*no.*bos_token_id"),
        ({"tokens": [*TOKENS[:-1], TOKENS[0]]}, r"'Ā' appears more than once"),
    ],
)
def test_refused_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        from_metadata(**changes)


# ------------------------------------------------------------------------------------------------ from a directory


def test_from_directory(tmp_path: Path) -> None:
    fixtures.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path, eos_token_ids=(fixtures.EOS_ID,))
    assert tokenizer.vocab_size == fixtures.VOCAB
    ids = tokenizer.encode("abc", add_special_tokens=True)
    assert ids == [0, 1, 2]
    assert tokenizer.decode([*ids, fixtures.EOS_ID], skip_special_tokens=True) == "abc"
    assert tokenizer.decode([*ids, fixtures.EOS_ID], skip_special_tokens=False) == "abc<|end|>"
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<|turn|>user\nhi\n<|turn|>assistant\n"
    assert tokenizer.encode_chat(chat, add_generation_prompt=True) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_chat(chat, add_generation_prompt=True).count(fixtures.TURN_ID) == 2


@pytest.mark.parametrize("content", [None, "garbage", "{}", '{"model": {"type": "Magic"}}'])
def test_a_directory_without_a_usable_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(CheckpointError, match=r"tokenizer"):
        Tokenizer.from_directory(tmp_path, eos_token_ids=())


# ------------------------------------------------------------------------------------------------ chat templates


def test_chat_template_complaints_are_the_requests_error() -> None:
    with pytest.raises(InvalidRequestError, match=r"chat template rejects") as error:
        BYTE_LEVEL.apply_chat_template([], add_generation_prompt=True)
    assert error.value.param == "messages"


def test_no_chat_template() -> None:
    metadata = {key: value for key, value in METADATA.items() if key != "tokenizer.chat_template"}
    tokenizer = Tokenizer.from_gguf(metadata, eos_token_ids=())
    assert not tokenizer.has_chat_template
    assert BYTE_LEVEL.has_chat_template
    with pytest.raises(InvalidRequestError, match=r"no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)


def test_a_chat_template_that_is_no_text() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template=3 must be a string"):
        Tokenizer.from_gguf({**METADATA, "tokenizer.chat_template": 3}, eos_token_ids=())


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ lipsum.__globals__ }}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ range(10000000) | list }}",
        "{% if %}",
    ],
)
def test_templates_are_sandboxed(template: str) -> None:
    metadata = {**METADATA, "tokenizer.chat_template": template}
    tokenizer = Tokenizer.from_gguf(metadata, eos_token_ids=())
    with pytest.raises(InvalidRequestError, match=r"chat template rejects"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)


# ------------------------------------------------------------------------------------------- incremental decoding


def test_incomplete_characters_are_held_back() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=True)
    ids = BYTE_LEVEL.encode("a🙂b", add_special_tokens=False)
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.flush() == ""
    assert detokenizer.text == "a🙂b"


def test_the_complete_part_of_a_push_is_returned_at_once() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=True)
    ids = BYTE_LEVEL.encode("hello 🙂", add_special_tokens=False)
    assert detokenizer.push(ids[:-1]) == "hello "
    assert detokenizer.push(ids[-1:]) == "🙂"


def test_an_output_that_ends_within_a_character() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=True)
    ids = BYTE_LEVEL.encode("x🙂", add_special_tokens=False)[:-1]
    assert detokenizer.push(ids) == "x"
    assert detokenizer.push([]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.text == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


def test_special_tokens_shown_or_skipped() -> None:
    ids = BYTE_LEVEL.encode(f"a{EOS}b", add_special_tokens=False)
    for skip, expected in ((True, ["a", "", "b"]), (False, ["a", EOS, "b"])):
        detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=skip)
        assert [detokenizer.push([i]) for i in ids] == expected


@st.composite
def pushes(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]], bool]:
    """Arbitrary ids, many of them lone bytes of characters, cut into arbitrary pieces."""
    tokenizer = draw(st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]))
    some_text = st.text(max_size=6).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    noise = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    ids = [i for part in draw(st.lists(some_text | noise, max_size=6)) for i in part]
    pieces = []
    while ids:
        size = draw(st.integers(0, 5))
        pieces.append(ids[:size])
        ids = ids[size:]
    return tokenizer, pieces, draw(st.booleans())


@given(case=pushes())
def test_deltas_add_up_to_the_full_decoding(case: tuple[Tokenizer, list[list[int]], bool]) -> None:
    tokenizer, pieces, skip = case
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    full = tokenizer.decode([i for piece in pieces for i in piece], skip_special_tokens=skip)
    streamed = ""
    for piece in pieces:
        streamed += detokenizer.push(piece)
        assert full.startswith(streamed)
        assert detokenizer.text == streamed
    assert streamed + detokenizer.flush() == full
    assert detokenizer.text == full
