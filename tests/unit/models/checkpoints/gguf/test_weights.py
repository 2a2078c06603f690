"""A GGUF file is read under transformers' names, as transformers reads it, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.gguf.header import TYPES, GgufHeader, read_header
from swarm_models.checkpoints.gguf.rope import missing_rope
from swarm_models.checkpoints.gguf.tokenizer import read_tokenizer
from swarm_models.checkpoints.gguf.weights import _dequantize, _read_config
from swarm_models.checkpoints.hollow_model import load_whole_model
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_server.blocks.block_loading import load_block
from tests.zoo import make_config

gguf = pytest.importorskip("gguf")  # the extra of that name

from tests.gguf_files import write_gguf  # noqa: E402
from tests.published import assert_read  # noqa: E402


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights(tmp_path: Path, type: str) -> None:
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, type=type, num_hidden_layers=1)
    assert_read(path, expected)


def test_matrices_are_unpacked_in_tiles_of_whole_heads(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    sizes = dict(hidden_size=256, num_attention_heads=8, num_key_value_heads=4)
    expected = write_gguf(path, type="Q8_0", num_hidden_layers=1, **sizes)
    for name, stored in ModelCheckpoint.open(path).stored(expected.__contains__).items():
        for min_rows in (64, 48):  # the last tile of 48 rows or more may have fewer heads than the others
            tiles = list(stored.tiles(min_rows))
            assert torch.equal(torch.cat(tiles), expected[name]), name
            assert (len(tiles) > 1) == (stored.has_tiles and len(expected[name]) > 64), name
        assert stored.has_tiles == (expected[name].ndim > 1), name


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma2"])
def test_what_the_converter_changes_is_undone(tmp_path: Path, name: str) -> None:
    options = {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64}
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, name=name, type="Q8_0", num_hidden_layers=2, **options if name == "qwen3_moe" else {})
    assert_read(path, expected)


def test_blocks_are_those_of_transformers(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, type="Q4_1", num_hidden_layers=2)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    checkpoint = ModelCheckpoint.open(path)
    ours = dict(load_block(checkpoint, 1, torch.float32).named_parameters())
    theirs = dict(whole.model.layers[1].named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    unlike = {"dtype": None, "quantization_config": None}  # how it is stored, not what it computes
    assert checkpoint.config.to_dict() | unlike == whole.config.to_dict() | unlike
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_id) == (1, 2)


def test_a_llama_with_biases_computes_what_its_weights_do_in_transformers(tmp_path: Path) -> None:
    """The converter puts the biases of queries and keys, too, into the order of its rotary embeddings."""
    path, options = tmp_path / "tiny.gguf", {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
    expected = write_gguf(path, type="Q8_0", **options)
    assert_read(path, expected)
    local = AutoModelForCausalLM.from_config(make_config("llama", **options)).eval()
    local.load_state_dict(expected)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, logits = load_whole_model(ModelCheckpoint.open(path))(ids).logits, local(ids).logits
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_a_llama_that_is_named_mistral_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    """transformers takes the name for another model type, for which llama.cpp has no table of names."""
    path = tmp_path / "tiny.gguf"
    expected = write_gguf(path, type="Q8_0", num_hidden_layers=2, general_name="mistral")
    assert_read(path, expected)
    checkpoint = ModelCheckpoint.open(path)
    assert (checkpoint.config.model_type, checkpoint.config.sliding_window) == ("mistral", None)
    local = AutoModelForCausalLM.from_config(make_config("llama", num_hidden_layers=2)).eval()
    local.load_state_dict(expected)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        found, logits = load_whole_model(checkpoint)(ids).logits, local(ids).logits
    assert (found - logits).abs().max() <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize("type", [name for name, block, _ in TYPES.values() if block > 1])
def test_blocks_of_every_type(type: str) -> None:
    from transformers.integrations.gguf import dequant

    (number,) = [number for number, (name, _, _) in TYPES.items() if name == type]
    _, block, block_bytes = TYPES[number]
    rows = torch.randint(0, 256, (3, 2 * block_bytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    halves = rows.view(3 * 2, block_bytes)
    for at in range(0, block_bytes - 1, 2):  # no infinity or what is no number may be among the scales
        halves[:, at + 1] &= 0x3B
    read = torch.from_numpy(_dequantize(rows, number))
    assert read.shape == (3, 2 * block)
    if number in dequant.GGML_BLOCK:
        expected = dequant.dequantize(rows.flatten(), number).view(read.shape)
    else:
        expected = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(number)))
    assert torch.allclose(read, expected, rtol=1e-5, atol=1e-9) and read.isfinite().all()


def test_shards(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    expected = write_gguf(tmp_path / "shards", type="Q8_0", num_shards=3, num_hidden_layers=2)
    shards = sorted(path.name for path in (tmp_path / "shards").glob("*.gguf"))
    assert len(shards) > 1
    assert_read(tmp_path / "shards", expected)
    with pytest.raises(CheckpointError, match=r"is one of \d files: expected the first, with -00001-of"):
        ModelCheckpoint.open(tmp_path / "shards" / shards[1])
    (tmp_path / "shards" / shards[1]).unlink()
    with pytest.raises(CheckpointError, match="has no tiny-00002-of"):
        ModelCheckpoint.open(tmp_path / "shards")


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        write_gguf(tmp_path / str(number) / f"{number}.gguf", num_hidden_layers=1)
    one, two = (tmp_path / str(number) / f"{number}.gguf" for number in (1, 2))
    assert ModelCheckpoint.open(one).revision == ModelCheckpoint.open(two).revision
    assert (ModelCheckpoint.open(one).name, ModelCheckpoint.open(one.parent).revision) == (
        "1.gguf",
        ModelCheckpoint.open(two).revision,
    )
    stored = ModelCheckpoint.open(two).block_tensors(0)["model.layers.0.self_attn.q_proj.weight"].pieces[0]
    with two.open("r+b") as file:
        file.seek(stored.offset + stored.size_bytes // 2)
        file.write(b"\x01\x02")
    assert ModelCheckpoint.open(one).revision != ModelCheckpoint.open(two).revision


def test_the_tokenizer_and_its_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", num_hidden_layers=1)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "of another model"}')
    tokenizer = read_tokenizer(str(tmp_path / "tiny.gguf"))
    assert tokenizer("ab", add_special_tokens=False).input_ids == [97]
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<user>ab"


def test_a_tokenizer_is_read_where_symbolic_links_are_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""

    def refused(*_args: object, **_options: object) -> None:
        raise OSError("a required privilege is not held by the client")

    write_gguf(tmp_path / "tiny.gguf", num_hidden_layers=1)
    monkeypatch.setattr("os.symlink", refused)
    monkeypatch.setattr(Path, "symlink_to", refused)
    assert read_tokenizer(str(tmp_path / "tiny.gguf")).eos_token == "</s>"


def llama3_factors(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """As llama.cpp's ``convert_hf_to_gguf.py`` computes them."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors, dtype=torch.float32)


def test_the_scaling_of_llama_3_is_read(tmp_path: Path) -> None:
    factors = llama3_factors(16, 10000.0, 8.0)
    assert factors.unique().numel() > 1
    write_gguf(tmp_path / "tiny.gguf", num_hidden_layers=1, rope_freqs=factors)
    rope = ModelCheckpoint.open(tmp_path / "tiny.gguf").config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)
    factors[-1] = 5.0
    write_gguf(tmp_path / "other.gguf", num_hidden_layers=1, rope_freqs=factors)
    with pytest.raises(UnsupportedModel, match="by factors of its own: expected those of Llama 3"):
        ModelCheckpoint.open(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("values", "is_scaled"),
    [
        ({"llama.rope.scaling.factor": 4.0}, True),  # without a type it is linear
        ({"llama.rope.scale_linear": 4.0}, True),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, True),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, False),
        ({"llama.rope.scale_linear": 0.0}, False),
        ({}, False),
    ],
)
def test_scaling_that_transformers_does_not_read_is_refused(values: dict[str, Any], is_scaled: bool) -> None:
    header = GgufHeader({"general.architecture": "llama", **values}, {})
    with pytest.raises(UnsupportedModel, match="scales rotary") if is_scaled else nullcontext():
        missing_rope(LlamaConfig(), header, Path("tiny.gguf"))


@pytest.mark.parametrize(("num_layers", "scalar"), [(2, 256), (46, 16)])
def test_attention_of_the_largest_gemma_2_is_scaled_by_its_heads(tmp_path: Path, num_layers: int, scalar: int) -> None:
    config = Gemma2Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=num_layers)
    with patch("swarm_models.checkpoints.gguf.weights.AutoConfig.from_pretrained", return_value=config):
        found = _read_config(tmp_path / "tiny.gguf", GgufHeader({"general.architecture": "gemma2"}, {}))
    assert found.query_pre_attn_scalar == scalar


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new, 1)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: b"nothing", "is no GGUF file"),
        (lambda data: data[:100], "is damaged: it ends inside its header"),
        (lambda data: data[:-1000], "is truncated: it ends before the end of '"),
        (lambda data: data[:4] + b"\0\0\0\3" + data[8:], r"is of version \d+ of GGUF, expected 2 or 3"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "is damaged: "),
        (lambda data: data[:8] + b"\xff" * 7 + b"\0" + data[16:], "is damaged: "),
        (replaced(b"general.architecture", b"general.architektura"), "does not say its general.architecture"),
        (
            replaced(b"blk.0.attn_q.weight\2\0\0\0", b"blk.0.attn_q.weight\7\0\0\0"),
            "'blk.0.attn_q.weight' of 7 dimensions",
        ),
        (
            replaced(b"blk.0.attn_q.weight", b"blk.0.attn_r.weight"),
            "holds blk.0.attn_r.weight, which the installed transformers does not read",
        ),
        (
            replaced(b"llama", b"lhama"),
            "cannot be read by the installed transformers: GGUF model with architecture lhama",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, change: Callable[[bytes], bytes], sentence: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, num_hidden_layers=1)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises((CheckpointError, UnsupportedModel), match=sentence) as caught:
        load_block(ModelCheckpoint.open(path), 0, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_type_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, num_hidden_layers=1)
    data = path.read_bytes()
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16  # behind name, dimensions and sizes
    path.write_bytes(data[:at] + (19).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match="in type 19 of ggml: expected one of F32, F16, Q4_0"):
        read_header(path)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", num_hidden_layers=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs one more package: pip install 'swarm-lm\[gguf\]'"):
        ModelCheckpoint.open(tmp_path / "tiny.gguf")
