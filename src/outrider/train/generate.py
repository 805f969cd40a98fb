"""The target asks, the target answers: batched generation that records features as it goes.

The target runs in compiled passes over quantised weights, as it is served, or in torch.

Contract: a fixed number of lanes, each with its own static stretch of keys and values. Every step feeds each lane one
token and takes one: from the lane's script while that has one (template text), else sampled. A lane whose question is
the target's own samples it until the end of the user's turn; then the rest of the chat template is scripted and the
answer is sampled at the lane's temperature. Where the question is given, all of it is run at once before the next
step, without logits: those rows teach nothing, so their log-sum-exp is +inf. Finished lanes start again at the end of
the template head, whose keys, values and features are the same for every question and stay in place.

Shape legend: B lanes, L longest sequence, F tapped width, D hidden size, H/K heads and key/value heads, S = B * L.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.batch.expert_metadata import ExpertMetadata
from outrider.config import QuantizationName
from outrider.errors import ConfigError
from outrider.layers.attention.interface import AttentionBackend, BlockMetadata, CausalMetadata, LayerKV
from outrider.models.decoder import Decoder
from outrider.models.interface import DecoderOutput
from outrider.models.native_decoder import NativeDecoder
from outrider.models.tokenizer import Tokenizer
from outrider.train.data import SequenceRows, TokenStore
from outrider.train.fast_ops import decode_attention, sample_rows
from outrider.train.prompts import QuestionFilter

_PATIENCE = 5000  # given questions refused in a row before giving up
_LOGIT_ROWS = 64  # whose logits exist at the same time: memory of hundreds would come fresh from the system every step
_FILL_ROWS = 1024  # of given questions in one pass
_MARK = "\u241eQUESTION\u241e"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    lanes: int
    max_question_tokens: int
    max_answer_tokens: int
    temperatures: tuple[float, ...]  # of the answers, in turn
    question_temperature: float
    question_top_p: float
    own_question_share: float  # of the questions, how many the target asks itself
    quantization: QuantizationName  # of the target that answers
    seed: int


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The chat template around one question: ``head`` question ``tail`` answer."""

    head: tuple[int, ...]
    tail: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFrame:
        """Without a chat template the frame is empty but for one end token, and the target cannot ask itself."""
        if not tokenizer.has_chat_template:
            return cls(head=tokenizer.eos_token_ids[:1], tail=())
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], add_generation_prompt=True)
        before, found, after = text.partition(_MARK)
        if not found:
            raise ConfigError("the chat template does not show the user's message; questions cannot be framed")
        return cls(
            head=tuple(tokenizer.encode(before, add_special_tokens=False)),
            tail=tuple(tokenizer.encode(after, add_special_tokens=False)),
        )


class LaneAttention:
    """``AttentionBackend`` of the generator: lane b owns slots b * L .. b * L + L.

    One query row for each lane in ascending order; stretches of rows for some of them are ``ragged``'s.
    """

    def __init__(self, lanes: int, ragged: AttentionBackend) -> None:
        self.lanes, self.ragged = lanes, ragged

    def write_kv(self, kv: LayerKV, *, key_NHD: Tensor, value_NHD: Tensor, slot_mapping_N: Tensor) -> None:
        kv.key_SHD.index_copy_(0, slot_mapping_N, key_NHD)
        kv.value_SHD.index_copy_(0, slot_mapping_N, value_NHD)

    def causal(self, query_NHD: Tensor, kv: LayerKV, metadata: CausalMetadata, *, scale: float) -> Tensor:
        if metadata.max_query_len > 1 or len(metadata.seq_lens_R) < self.lanes:
            return self.ragged.causal(query_NHD, kv, metadata, scale=scale)
        shape = (self.lanes, -1, *kv.key_SHD.shape[1:])
        key, value = kv.key_SHD.view(shape), kv.value_SHD.view(shape)
        return decode_attention(query_NHD, key, value, metadata.seq_lens_R, scale=scale)

    def block(
        self,
        query_NHD: Tensor,
        kv: LayerKV,
        metadata: BlockMetadata,
        *,
        key_NHD: Tensor,
        value_NHD: Tensor,
        scale: float,
    ) -> Tensor:
        raise AssertionError("the generator runs no drafter")


class Lanes:
    """One generation in progress. ``run`` is the loop; everything else serves it."""

    def __init__(
        self,
        target: Decoder | NativeDecoder,
        frame: ChatFrame,
        settings: GenerationSettings,
        *,
        tap_layer_ids: tuple[int, ...],
        stop_ids: tuple[int, ...],
        questions: Iterator[list[int]],
        admit: Callable[[list[int]], bool],
    ) -> None:
        config = target.config
        if settings.own_question_share > 0 and not frame.tail:
            raise ConfigError(
                f"own_question_share={settings.own_question_share} needs a chat template that ends the user's turn"
            )
        self.target, self.frame, self.settings = target, frame, settings
        self.tap_layer_ids, self.stop_ids = tap_layer_ids, stop_ids
        self.questions, self.admit = questions, admit
        self.longest = len(frame.head) + settings.max_question_tokens + len(frame.tail) + settings.max_answer_tokens
        if self.longest > config.max_position_embeddings:
            raise ConfigError(
                f"question, answer and template take {self.longest} tokens, over max_position_embeddings="
                f"{config.max_position_embeddings}"
            )
        B, L = settings.lanes, self.longest
        dtype = torch.bfloat16 if isinstance(target, NativeDecoder) else target.embed_tokens.weight.dtype
        shape = (B * L, config.num_kv_heads, config.head_dim)
        self.kv = [LayerKV(*torch.zeros(2, *shape, dtype=dtype)) for _ in range(config.num_layers)]
        self.tokens_BL = torch.zeros(B, L, dtype=torch.int64)
        self.script_BL = torch.full((B, L), -1, dtype=torch.int64)
        self.taps_BLF = torch.zeros(B, L, len(tap_layer_ids) * config.hidden_size, dtype=torch.bfloat16)
        self.hidden_BLD = torch.zeros(B, L, config.hidden_size, dtype=torch.bfloat16)
        self.lse_BL = torch.zeros(B, L)
        self.position_B = torch.zeros(B, dtype=torch.int64)
        self.temperature_B = torch.zeros(B)
        self.top_p_B = torch.ones(B)
        self.answer_temperature = [0.0] * B
        self.answer_start = [-1] * B  # position of the first answer token; -1: the target is still asking
        self.answer_limit = [0] * B
        self.given: list[int] = []  # lanes whose question is given and not run yet
        self.started = 0
        self.generator = torch.Generator().manual_seed(settings.seed)

    @torch.inference_mode()
    def run(self, store: TokenStore, *, stop: Callable[[TokenStore], bool], report: Callable[[int], None]) -> None:
        """Generate until ``stop`` says so or the store is full; ``report`` gets the tokens of each step."""
        head = torch.tensor(self.frame.head)
        self.script_BL[:, : len(head)] = head
        self.tokens_BL[:, 0] = head[0]
        for lane in range(self.settings.lanes):
            self._restart(lane, at=0)
        self._fill()
        while not stop(store):
            lse_B, sampled_B = self._step()
            if not self._take(lse_B, sampled_B, store):
                break
            self._fill()
            report(self.settings.lanes)
        store.flush()

    def _step(self) -> tuple[Tensor, Tensor]:
        """Feed every lane its current token; log-sum-exp and a sample for the next position."""
        B = self.settings.lanes
        lane_B, position_B = torch.arange(B), self.position_B
        output = self._forward(lane_B, position_B, torch.arange(B + 1), lane_B)
        uniform_B = torch.rand(B, dtype=torch.float64, generator=self.generator)
        parts = [
            sample_rows(
                self._logits(output.hidden_ND[part]),
                temperature_B=self.temperature_B[part],
                top_p_B=self.top_p_B[part],
                uniform_B=uniform_B[part],
            )
            for part in (slice(start, start + _LOGIT_ROWS) for start in range(0, B, _LOGIT_ROWS))
        ]
        lse_B, sampled_B = (torch.cat(found) for found in zip(*parts, strict=True))
        return lse_B, sampled_B

    def _forward(self, lane_N: Tensor, position_N: Tensor, start_R1: Tensor, lane_R: Tensor) -> DecoderOutput:
        """A pass over these rows, which keeps their features: a stretch of neighbouring positions for every lane_R."""
        L = self.longest
        last_R = start_R1[1:] - 1
        metadata = CausalMetadata(
            query_start_loc_R1=start_R1.to(torch.int32),
            seq_lens_R=(position_N[last_R] + 1).to(torch.int32),
            block_tables_RB=lane_R[:, None].to(torch.int32),
            slot_mapping_N=lane_N * L + position_N,
            kv_block_size=L,
            max_query_len=int(start_R1.diff().max()),
            max_seq_len=L,
        )
        output = self.target.forward(
            self.tokens_BL[lane_N, position_N],
            position_N,
            self.kv,
            metadata,
            self.tap_layer_ids,
            ExpertMetadata.single(len(lane_N)),
        )
        self.taps_BLF[lane_N, position_N] = output.taps_NF.to(torch.bfloat16)
        self.hidden_BLD[lane_N, position_N] = output.hidden_ND.to(torch.bfloat16)
        return output

    def _fill(self) -> None:
        """Run the given questions, up to the token before the answer's first: the next step feeds that one."""
        waiting, self.given = self.given, []
        while waiting:
            stretches: list[Tensor] = []
            lanes: list[int] = []
            rows = 0
            while waiting and (not rows or rows + self.answer_start[waiting[0]] <= _FILL_ROWS):
                lane = waiting.pop(0)
                stretch = torch.arange(int(self.position_B[lane]), self.answer_start[lane] - 1)
                self.tokens_BL[lane, : self.answer_start[lane]] = self.script_BL[lane, : self.answer_start[lane]]
                self.lse_BL[lane, stretch] = torch.inf
                self.position_B[lane] = self.answer_start[lane] - 1
                if len(stretch):
                    stretches.append(stretch)
                    lanes.append(lane)
                    rows += len(stretch)
            if lanes:
                lengths = torch.tensor([len(stretch) for stretch in stretches])
                lane_R = torch.tensor(lanes)
                start_R1 = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
                self._forward(lane_R.repeat_interleave(lengths), torch.cat(stretches), start_R1, lane_R)

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        """[B, V] in the type the target computes them in: of bf16 ones a copy in fp32 would cost as much again."""
        if isinstance(self.target, NativeDecoder):
            return self.target.compute_logits(hidden_BD)
        return torch.nn.functional.linear(hidden_BD, self.target.lm_head.weight)

    def _take(self, lse_B: Tensor, sampled_B: Tensor, store: TokenStore) -> bool:
        """Advance every lane by its next token; False when the store is full."""
        lane_B = torch.arange(self.settings.lanes)
        self.lse_BL[lane_B, self.position_B] = lse_B
        self.position_B += 1
        script_B = self.script_BL[lane_B, self.position_B]
        next_B = torch.where(script_B >= 0, script_B, sampled_B)
        self.tokens_BL[lane_B, self.position_B] = next_B
        rows = zip(self.position_B.tolist(), script_B.tolist(), next_B.tolist(), strict=True)
        for lane, (position, script, token) in enumerate(rows):
            if script >= 0:
                continue
            if self.answer_start[lane] < 0:
                self._question_token(lane, position, token)
            elif token in self.stop_ids or position + 1 - self.answer_start[lane] >= self.answer_limit[lane]:
                if not store.append(self._rows(lane, position + 1)):
                    return False
                if len(store.spans) % 64 == 0:
                    store.flush()
                self._restart(lane, at=len(self.frame.head) - 1)
        return True

    def _question_token(self, lane: int, position: int, token: int) -> None:
        head = len(self.frame.head)
        if token == self.frame.tail[0]:
            if self.admit(self.tokens_BL[lane, head:position].tolist()):
                self._answer_from(lane, position)
            else:
                self._restart(lane, at=head - 1)
        elif token in self.stop_ids or position + 1 - head >= self.settings.max_question_tokens:
            self._restart(lane, at=head - 1)

    def _restart(self, lane: int, *, at: int) -> None:
        """A new question in this lane, fed from position ``at`` (a position of the template head)."""
        settings, head = self.settings, len(self.frame.head)
        self.position_B[lane] = at
        self.script_BL[lane, head:] = -1
        self.answer_temperature[lane] = settings.temperatures[self.started % len(settings.temperatures)]
        self.started += 1
        own = float(torch.rand((), generator=self.generator)) < settings.own_question_share
        if own:
            self.answer_start[lane] = -1
            self.temperature_B[lane], self.top_p_B[lane] = settings.question_temperature, settings.question_top_p
            return
        question = next(self.questions)
        self.script_BL[lane, head : head + len(question)] = torch.tensor(question)
        self._answer_from(lane, head + len(question))
        self.given.append(lane)

    def _answer_from(self, lane: int, position: int) -> None:
        """Script the template's tail from ``position`` and sample the answer after it."""
        tail = torch.tensor(self.frame.tail, dtype=torch.int64)
        self.script_BL[lane, position : position + len(tail)] = tail
        self.answer_start[lane] = position + len(tail)
        most = self.settings.max_answer_tokens
        self.answer_limit[lane] = int(torch.randint(most // 2, most + 1, (), generator=self.generator))
        self.temperature_B[lane], self.top_p_B[lane] = self.answer_temperature[lane], 1.0

    def _rows(self, lane: int, length: int) -> SequenceRows:
        return SequenceRows(
            tokens_N=self.tokens_BL[lane, :length],
            answer_N=torch.arange(length) >= self.answer_start[lane],
            taps_NF=self.taps_BLF[lane, :length],
            hidden_ND=self.hidden_BLD[lane, :length],
            lse_N=self.lse_BL[lane, :length],
            temperature=self.answer_temperature[lane],
        )


def generate(
    target: Decoder | NativeDecoder,
    tokenizer: Tokenizer,
    store: TokenStore,
    settings: GenerationSettings,
    *,
    tap_layer_ids: tuple[int, ...],
    texts: Iterator[str],
    question_filter: QuestionFilter,
    max_seconds: float,
    report: Callable[[int], None],
) -> None:
    """Fill ``store`` with the target's answers until it is full or ``max_seconds`` have passed."""

    def encoded() -> Iterator[list[int]]:
        refused = 0
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) <= settings.max_question_tokens and question_filter.admit(text):
                refused = 0
                yield ids
            elif (refused := refused + 1) == _PATIENCE:
                raise ConfigError(
                    f"the last {_PATIENCE} templated questions were repeated, excluded or longer than "
                    f"max_question_tokens={settings.max_question_tokens}"
                )

    def admit(ids: list[int]) -> bool:
        return question_filter.admit(tokenizer.decode(ids, skip_special_tokens=False))

    started = time.monotonic()
    with _lane_attention(target, settings.lanes):
        lanes = Lanes(
            target,
            ChatFrame.of(tokenizer),
            settings,
            tap_layer_ids=tap_layer_ids,
            stop_ids=tokenizer.eos_token_ids,
            questions=encoded(),
            admit=admit,
        )
        lanes.run(store, stop=lambda _: time.monotonic() - started > max_seconds, report=report)


@contextmanager
def _lane_attention(target: Decoder | NativeDecoder, lanes: int) -> Iterator[None]:
    """Within it a torch target attends over lanes; compiled passes have an attention of their own, to any layout."""
    if isinstance(target, NativeDecoder):
        yield
        return
    backend = target.backend
    target.backend = LaneAttention(lanes, backend)
    try:
        yield
    finally:
        target.backend = backend
