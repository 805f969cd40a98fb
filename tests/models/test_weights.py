"""Loaders: every tensor is accounted for, and every way a file can be wrong ends in a CheckpointError that says how."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.gguf_writing import byte_alphabet, write_gguf
from torch import Tensor

from outrider.errors import CheckpointError, OutriderError
from outrider.layers.attention.reference import ReferenceAttention
from outrider.layers.checkpoint import checkpoint_views
from outrider.models.decoder import Decoder
from outrider.models.gguf_file import GGUFFile
from outrider.models.model_config import from_gguf, from_hf
from outrider.models.weights import load_weights
from outrider.models.weights_gguf import iterate_gguf
from outrider.models.weights_safetensors import iterate_safetensors, read_header
from outrider.parallel.state import SINGLE_RANK

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 256,
}
TOKENS, TYPES = [*byte_alphabet(), "<|end|>"], [1] * 256 + [3]


def make_model(**changes: Any) -> Decoder:
    return Decoder(from_hf({**CONFIG, **changes}), parallel=SINGLE_RANK, backend=ReferenceAttention())


def make_tensors(**changes: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    views = checkpoint_views(make_model(**changes))
    return {
        name if name.startswith("lm_head") else f"model.{name}": torch.randn(view.shape, generator=generator)
        for name, view in views.items()
    }


def load(model: Decoder, directory: Path) -> None:
    load_weights(model, iterate_safetensors(directory), source="test", on_tensor=lambda: None)


def assert_holds(model: Decoder, tensors: dict[str, Tensor]) -> None:
    views = checkpoint_views(model)
    assert len(views) == len(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(views[name.removeprefix("model.")].tensor, tensor), name


def save_sharded(directory: Path, tensors: dict[str, Tensor], shards: int) -> dict[str, str]:
    """Round-robin shards with an index that lists them last to first; returns the weight map."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in reversed(range(shards)):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, directory / file_name)
        weight_map |= dict.fromkeys(names[shard::shards], file_name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# ------------------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_single_file_with_and_without_prefix(tmp_path: Path, prefix: str) -> None:
    tensors = make_tensors()
    stored = {name.replace("model.", prefix): tensor for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors")
    model = make_model()
    loaded: list[None] = []
    load_weights(model, iterate_safetensors(tmp_path), source="test", on_tensor=lambda: loaded.append(None))
    assert_holds(model, tensors)
    assert len(loaded) == len(tensors)


def test_shards_in_any_order(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_sharded(tmp_path, tensors, 3)
    model = make_model()
    load(model, tmp_path)
    assert_holds(model, tensors)


def test_stored_dtypes_are_converted(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = make_model()
    load(model, tmp_path)
    assert_holds(model, {name: tensor.float() for name, tensor in tensors.items()})


def test_rotary_tables_of_old_checkpoints_are_skipped(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    model = make_model()
    load(model, tmp_path)
    assert_holds(model, tensors)


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_stored_twice_must_be_the_embedding(tmp_path: Path, head_first: bool) -> None:
    tensors = make_tensors(tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    stored = head | tensors if head_first else tensors | head
    model = make_model(tie_word_embeddings=True)
    load_weights(model, stored.items(), source="test", on_tensor=lambda: None)
    assert_holds(model, tensors)
    stored["lm_head.weight"] = stored["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true.*lm_head\.weight"):
        load_weights(model, stored.items(), source="test", on_tensor=lambda: None)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)


def transpose(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, r"1 missing tensors: layers\.1\.mlp\.up_proj\.weight \(64, 32\)"),
        (add, r"unexpected tensor 'model\.layers\.2\.mlp\.up_proj\.weight'"),
        (reshape, r"k_proj\.weight' has shape \(8, 32\).*\(16, 32\)"),
        (transpose, r"up_proj\.weight' has shape \(32, 64\).*\(64, 32\)"),
    ],
)
def test_every_tensor_is_accounted_for(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = make_tensors()
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(make_model(), tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file({name: tensors[name] for name in list(tensors)[:8]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{len(tensors) - 8} missing tensors: .* and {len(tensors) - 13} more"):
        load(make_model(), tmp_path)


def test_the_same_tensor_under_both_spellings(tmp_path: Path) -> None:
    tensors = make_tensors()
    save_file(tensors | {"norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight' appears more than once"):
        load(make_model(), tmp_path)


@pytest.mark.parametrize(
    "file_name", ["../model.safetensors", "/etc/model.safetensors", "sub/m.safetensors", "m.bin", 3]
)
def test_index_entries_stay_in_the_directory(tmp_path: Path, file_name: object) -> None:
    write_index(tmp_path, {"model.norm.weight": file_name})
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is mapped to .*this directory"):
        load(make_model(), tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    tensors = make_tensors()
    weight_map = save_sharded(tmp_path, tensors, 2)
    write_index(tmp_path, {**weight_map, "model.ghost": weight_map["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"'model\.ghost' is missing"):
        load(make_model(), tmp_path)
    write_index(tmp_path, {name: shard for name, shard in weight_map.items() if name != "model.norm.weight"})
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'model\.norm\.weight'"):
        load(make_model(), tmp_path)
    write_index(tmp_path, weight_map)
    (tmp_path / weight_map["model.norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match=r"shard model-0000\d-of-00002\.safetensors is missing"):
        load(make_model(), tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"a": 1, "a": 2}', "\xff"]
)
def test_malformed_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(make_model(), tmp_path)


def header_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"truncated"),
    "short": (b"\x01\x02", r"truncated"),
    "length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", r"truncated"),
    "not json": (header_file(b"garbage!"), r"malformed safetensors header"),
    "not utf-8": (header_file(b"\xff\xfe\xfd"), r"malformed safetensors header"),
    "deep nesting": (header_file(b"[" * 200_000), r"malformed safetensors header"),
    "a list": (header_file([]), r"not a JSON object"),
    "duplicate names": (header_file(b'{"a": {}, "a": {}}'), r"duplicate key 'a'"),
    "entry is no object": (header_file({"a": 3}), r"'a' has a malformed header entry"),
    "no offsets": (header_file({"a": {"dtype": "F32", "shape": [1]}}), r"malformed header entry"),
    "unknown dtype": (header_file({"a": {**ENTRY, "dtype": "F8_E4M3"}}, b"0000"), r"'F8_E4M3'; supported: F32"),
    "negative offset": (header_file({"a": {**ENTRY, "data_offsets": [-4, 0]}}), r"malformed data offsets"),
    "offsets not numbers": (header_file({"a": {**ENTRY, "data_offsets": ["0", "4"]}}), r"malformed data offsets"),
    "data cut off": (header_file({"a": ENTRY}, b"00"), r"truncated; tensor 'a' ends at byte 4.*has 2"),
    "size against shape": (header_file({"a": {**ENTRY, "shape": [3]}}, b"0000"), r"cannot be read"),
    "trailing data": (header_file({"a": ENTRY}, b"00000000"), r"cannot be read"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_safetensors(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        list(iterate_safetensors(tmp_path))


def test_header_metadata_is_not_a_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, path, metadata={"format": "pt"})
    assert list(read_header(path)) == ["a"]
    assert list(load_file(path)) == ["a"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=rf"only {name} found; pickled weights are never loaded"):
        load(make_model(), tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(make_model(), tmp_path)


# -------------------------------------------------------------------------------------------------------- GGUF


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_llama_gives_back_the_hf_tensors(tmp_path: Path, tied: bool) -> None:
    tensors = make_tensors(tie_word_embeddings=tied, attention_bias=True)
    path = write_gguf(tmp_path / "m.gguf", "llama", CONFIG, tensors, tokens=TOKENS, types=TYPES)
    file = GGUFFile(path)
    config = from_gguf(file.metadata, file.tensor_shapes)
    assert config == from_hf({**CONFIG, "tie_word_embeddings": tied, "attention_bias": True})
    model = Decoder(config, parallel=SINGLE_RANK, backend=ReferenceAttention())
    load_weights(model, iterate_gguf(file, config), source="test", on_tensor=lambda: None)
    assert_holds(model, tensors)


def test_gguf_qwen3_is_not_permuted(tmp_path: Path) -> None:
    shape = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    tensors = make_tensors(**shape)
    path = write_gguf(tmp_path / "m.gguf", "qwen3", CONFIG, tensors, tokens=TOKENS, types=TYPES)
    file = GGUFFile(path)
    config = from_gguf(file.metadata, file.tensor_shapes)
    assert config == from_hf({**CONFIG, **shape})
    model = Decoder(config, parallel=SINGLE_RANK, backend=ReferenceAttention())
    load_weights(model, iterate_gguf(file, config), source="test", on_tensor=lambda: None)
    assert_holds(model, tensors)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_gguf_quantisations(tmp_path: Path, name: str) -> None:
    quantisation = GGMLQuantizationType[name]
    tensors = make_tensors()
    path = write_gguf(
        tmp_path / "m.gguf", "llama", CONFIG, tensors, tokens=TOKENS, types=TYPES, quantisation=quantisation
    )
    file = GGUFFile(path)
    loaded = dict(iterate_gguf(file, from_gguf(file.metadata, file.tensor_shapes)))
    stored = tensors["model.layers.1.mlp.down_proj.weight"].numpy()
    expected = torch.from_numpy(dequantize(quantize(stored, quantisation), quantisation))
    assert torch.equal(loaded["layers.1.mlp.down_proj.weight"], expected)
    assert loaded["layers.1.mlp.down_proj.weight"].dtype == torch.float32


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, "llama", CONFIG, make_tensors(), tokens=TOKENS, types=TYPES).read_bytes()


def test_gguf_with_a_tensor_too_many(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.5.mlp.up_proj.weight"] = torch.zeros(32)
    path = write_gguf(tmp_path / "m.gguf", "llama", CONFIG, tensors, tokens=TOKENS, types=TYPES)
    file = GGUFFile(path)
    config = from_gguf(file.metadata, file.tensor_shapes)
    with pytest.raises(CheckpointError, match=r"unexpected tensor 'layers\.5\.mlp\.up_proj\.weight'"):
        load_weights(
            Decoder(config, parallel=SINGLE_RANK, backend=ReferenceAttention()),
            iterate_gguf(file, config),
            source="t",
            on_tensor=lambda: None,
        )


def header(*parts: bytes, tensors: int = 0, fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, dims: tuple[int, ...], type_: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_, offset)


MALFORMED_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"cannot be read"),
    "another format": (b"PK\x03\x04" + bytes(100), r"not a GGUF file"),
    "magic only": (b"GGUF", r"truncated or malformed"),
    "future version": (header(version=9), r"version 9 is not supported"),
    "byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), r"version 50331648"),
    "more fields than bytes": (header(fields=1 << 60), r"truncated or malformed"),
    "endless string": (header(struct.pack("<Q", 1 << 62), fields=1), r"truncated or malformed"),
    "endless array": (header(text(b"k"), struct.pack("<IIQ", 9, 4, 1 << 61), fields=1), r"truncated or malformed"),
    "endless string array": (header(text(b"k"), struct.pack("<IIQ", 9, 8, 1 << 61), fields=1), r"truncated"),
    "unknown value type": (header(text(b"k"), struct.pack("<I", 77), fields=1), r"unknown value type 77"),
    "array of arrays": (header(text(b"k"), struct.pack("<IIQ", 9, 9, 1), fields=1), r"array of value type 9"),
    "key not utf-8": (header(text(b"\xff\xfe"), fields=1), r"is not UTF-8"),
    "key twice": (header(*[text(b"k") + struct.pack("<II", 4, 1)] * 2, fields=2), r"'k' appears more than once"),
    "no dimensions": (header(tensor(b"t", ()), tensors=1), r"'t' has 0 dimensions"),
    "tensor twice": (
        header(tensor(b"t", (1,)), tensor(b"t", (1,)), bytes(99), tensors=2),
        r"'t' appears more than once",
    ),
    "unknown tensor type": (header(tensor(b"t", (32,), type_=4000), tensors=1), r"unknown type 4000"),
    "half a block": (header(tensor(b"t", (33,), type_=8), tensors=1), r"does not divide into Q8_0"),
    "empty tensor": (header(tensor(b"t", (0, 4)), tensors=1), r"empty shape \(4, 0\)"),
    "beyond the end": (header(tensor(b"t", (4,), offset=1 << 40), tensors=1), r"truncated; tensor 't'"),
    "huge": (header(tensor(b"t", (1 << 62, 1 << 62)), tensors=1), r"truncated; tensor 't'"),
    "alignment": (
        header(text(b"general.alignment"), struct.pack("<II", 4, 0), tensor(b"t", (4,)), fields=1, tensors=1),
        r"general\.alignment=0",
    ),
}


@pytest.mark.parametrize("case", MALFORMED_GGUF)
def test_malformed_gguf(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED_GGUF[case]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "m.gguf")


@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_gguf(gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    path.write_bytes(gguf_bytes[: int(share * (len(gguf_bytes) - 32))])
    with pytest.raises(CheckpointError, match=r"truncated|cannot be read|not a GGUF file"):
        GGUFFile(path)


@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_damaged_gguf_header_never_ends_in_another_error(
    gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory, position: float, value: int
) -> None:
    """One byte of the header changed: the file loads, or the error is one of ours."""
    header_size = gguf_bytes.index(b"token_embd") + 400
    damaged = bytearray(gguf_bytes)
    damaged[int(position * header_size)] = value
    path = tmp_path_factory.mktemp("bent") / "m.gguf"
    path.write_bytes(damaged)
    try:
        file = GGUFFile(path)
        config = from_gguf(file.metadata, file.tensor_shapes)
        for _ in iterate_gguf(file, config):
            pass
    except OutriderError:
        return
    assert file.tensor_shapes


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")
