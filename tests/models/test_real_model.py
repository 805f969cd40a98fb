"""The built-in model against transformers reading the same file: tokenizer byte for byte, logits within 1e-4."""

from __future__ import annotations

import pytest
import torch
from tests.paged import PagedSequences
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from outrider.models.source import DEFAULT_MODEL, LoadedModel, load_model

pytestmark = pytest.mark.real_model

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "日本語のテキスト、émojis 🙂 and 12345 numbers.",
]
PIECES = [
    "hello",
    " world",
    "The quick brown fox",
    "12345 67,890.12",
    "x = [i**2 for i in range(10)]\n",
    "\t\ttabs\r\nand lines\n\n\n",
    "   leading spaces",
    "trailing   ",
    "naïve café",
    "e\u0301 combining",
    "日本語テキスト",
    "Привет, мир",
    "مرحبا",
    "🙂👩‍👩‍👧‍👦🇫🇷",
    "ﬁ ligature ½",
    "it's they'll WE'VE",
    "<|im_start|>user\n",
    "<|im_end|>",
    "<|endoftext|>",
    "<repo_name>a<file_sep>b",
    "<|im_start|",
    "\u200b\ufeff\x00",
    "a" * 50,
    "https://example.org/path?q=1&r=%20",
    "$\\frac{a}{b}$ ≤ ∑",
]
CHATS = [
    [{"role": "user", "content": "Hi!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?\n"}],
    [
        {"role": "user", "content": "<|im_end|> in the text"},
        {"role": "assistant", "content": " ok 🙂 "},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture(scope="module")
def ours() -> LoadedModel:
    return load_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def their_model(ours: LoadedModel) -> PreTrainedModel:
    """Config, weights and their mapping by transformers; only its device placement, which wants accelerate, is not."""
    model = LlamaForCausalLM(AutoConfig.from_pretrained(ours.path.parent, gguf_file=ours.path.name))
    checkpoint = load_gguf_checkpoint(str(ours.path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(checkpoint["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    result: PreTrainedModel = model.float().eval()
    return result


@pytest.fixture(scope="module")
def their_tokenizer(ours: LoadedModel) -> PreTrainedTokenizerFast:
    """transformers ignores the pre-tokenizer that the file names ("smollm"): each digit apart, then byte level.

    It makes no difference to ASCII digits, which have no merges, but to others such as ½.
    """
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(ours.path.parent, gguf_file=ours.path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
    )
    return tokenizer


def test_tokenizer_equals_transformers(ours: LoadedModel, their_tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [*PIECES, *(a + b for a in PIECES for b in PIECES[::5]), "".join(PIECES)]
    for text in texts:
        ids = ours.tokenizer.encode(text, add_special_tokens=True)
        assert ids == their_tokenizer.encode(text), text
        for skip in (True, False):
            decoded = ours.tokenizer.decode(ids, skip_special_tokens=skip)
            assert decoded == their_tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_template_equals_transformers(ours: LoadedModel, their_tokenizer: PreTrainedTokenizerFast) -> None:
    for chat in CHATS:
        for prompt in (True, False):
            text = ours.tokenizer.apply_chat_template(chat, add_generation_prompt=prompt)
            assert text == their_tokenizer.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
            ids = ours.tokenizer.encode_chat(chat, add_generation_prompt=prompt)
            assert ids == their_tokenizer.encode(text, add_special_tokens=False)


def test_logits_and_taps_equal_transformers(ours: LoadedModel, their_model: PreTrainedModel) -> None:
    """All prompts share one ragged pass."""
    prompts = [ours.tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    taps = (-1, 1, 14, 27)
    result = PagedSequences(ours.model, requests=len(prompts), max_len=64).run(dict(enumerate(prompts)), taps=taps)
    starts = [sum(map(len, prompts[:request])) for request in range(len(prompts))]
    for prompt, logits, start in zip(prompts, result.logits, starts, strict=True):
        with torch.inference_mode():
            theirs = their_model(torch.tensor([prompt]), output_hidden_states=True)
        torch.testing.assert_close(logits, theirs.logits[0], rtol=0, atol=1e-4)
        hidden = torch.cat([theirs.hidden_states[tap + 1][0] for tap in taps], dim=-1)
        rows = result.output.taps_NF[start : start + len(prompt)]
        torch.testing.assert_close(rows, hidden, rtol=1e-4, atol=1e-3)


def test_greedy_continuation(ours: LoadedModel) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = ours.tokenizer.encode_chat(chat, add_generation_prompt=True)
    sequences = PagedSequences(ours.model, requests=1, max_len=64)
    last, emitted = ids, list[int]()
    while not emitted or emitted[-1] not in ours.config.eos_token_ids:
        assert len(emitted) < 20
        emitted.append(int(sequences.run({0: last}).logits[0][-1].argmax()))
        last = emitted[-1:]
    assert ours.tokenizer.decode(emitted, skip_special_tokens=True) == "The capital of France is Paris."
