"""Reading checkpoints: only what is needed, and a clear sentence for everything that can be wrong with one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm_models.checkpoints import safetensors_file
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.files import HubUnreachable
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from tests.vision_zoo import save_seeing
from tests.zoo import BLOCKS, save_checkpoint

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_checkpoint("llama", tmp_path / "tiny-llama", num_hidden_layers=3)
    return tmp_path / "tiny-llama"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_checkpoint("llama", tmp_path / "tiny-llama", num_hidden_layers=3, max_shard_size="1GB")
    return tmp_path / "tiny-llama"


def weight_map(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def edit_json(path: Path, edit: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, files: list[str]) -> str:
    """A local hub cache that holds these files of the model ``someone/tiny-llama``; returns the commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny-llama"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for name in files:
        (snapshot / name).write_bytes((checkpoint / name).read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return commit


@pytest.mark.parametrize("layout", ["sharded", "single"])
def test_reads_what_was_saved(layout: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(layout)
    saved: dict[str, torch.Tensor] = {}
    for shard in directory.glob("*.safetensors"):
        saved |= load_file(shard)
    checkpoint = ModelCheckpoint.open(directory)
    read = checkpoint.read(lambda name: True)
    assert checkpoint.name == "tiny-llama"
    assert checkpoint.config.num_hidden_layers == 3
    assert set(read) == set(saved) == set(checkpoint.tensor_names)
    assert all(torch.equal(read[name], saved[name]) and read[name].dtype == saved[name].dtype for name in saved)


def test_blocks_and_client_share_out_all_tensors(sharded: Path) -> None:
    checkpoint = ModelCheckpoint.open(sharded)
    parts = [checkpoint.client_tensors(), *(checkpoint.block_tensors(index) for index in range(3))]
    assert sorted(name for part in parts for name in part) == sorted(checkpoint.tensor_names)
    assert set(parts[0]) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert all(name.startswith("model.layers.1.") for name in parts[2])


@pytest.mark.parametrize("name", ["llava", "llama4"])
def test_a_vision_tower_is_the_clients(name: str, tmp_path: Path) -> None:
    """Its blocks have the same names as the language model's: ``layers.0`` and so on."""
    save_seeing(name, tmp_path)
    checkpoint = ModelCheckpoint.open(tmp_path)
    others = checkpoint.client_tensors()
    assert any("vision" in tensor and "layers.0." in tensor for tensor in others)
    inside = {stored.name for index in range(BLOCKS) for stored in checkpoint.block_tensors(index).values()}
    assert inside and all("language_model" in tensor for tensor in inside)
    assert inside | others.keys() == set(checkpoint.tensor_names) and not inside & others.keys()
    assert sum(checkpoint.block_parameters(index) for index in range(BLOCKS)) == sum(
        stored.read().numel() for index in range(BLOCKS) for stored in checkpoint.block_tensors(index).values()
    )


def test_every_dtype_survives(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in safetensors_file.DTYPES.values()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "some.safetensors")
    stored = safetensors_file.read_header(tmp_path / "some.safetensors")
    for name, tensor in tensors.items():
        read = stored[name].read()
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
    assert stored["scalar"].read() == 2.5


def test_generation_config(sharded: Path) -> None:
    assert ModelCheckpoint.open(sharded).generation_config.eos_token_id == 2
    (sharded / "generation_config.json").unlink()
    assert ModelCheckpoint.open(sharded).generation_config is None


def test_equal_weights_have_equal_fingerprints(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_checkpoint("llama", tmp_path / name, num_hidden_layers=2)
    edit_json(tmp_path / "b" / "config.json", lambda config: config.update(transformers_version="5.0", dtype="float16"))
    assert ModelCheckpoint.open(tmp_path / "a").revision == ModelCheckpoint.open(tmp_path / "b").revision


def test_other_weights_have_another_fingerprint(sharded: Path) -> None:
    before = ModelCheckpoint.open(sharded).revision
    edit_tensors(sharded / weight_map(sharded)[Q_PROJ], lambda tensors: tensors[Q_PROJ].mul_(1.01))
    after = ModelCheckpoint.open(sharded).revision
    assert before != after
    assert len(before) == len(after) == 16


def test_tensors_that_have_changed_places_have_another_fingerprint(single: Path) -> None:
    """Only the header of the file says which of the two norms is which."""
    before, path = ModelCheckpoint.open(single).revision, single / "model.safetensors"
    one, other = (f'"model.layers.0.{norm}_layernorm.weight"'.encode() for norm in ("input", "post_attention"))
    data = path.read_bytes()
    assert data.count(one) == data.count(other) == 1
    path.write_bytes(data.replace(one, b"<one>").replace(other, one).replace(b"<one>", other))
    assert ModelCheckpoint.open(single).revision != before


def test_another_config_has_another_fingerprint(sharded: Path) -> None:
    before = ModelCheckpoint.open(sharded).revision
    edit_json(sharded / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    assert ModelCheckpoint.open(sharded).revision != before


def test_only_needed_shards_are_opened(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = {shard for name, shard in weight_map(sharded).items() if name.startswith("model.layers.1.")}
    assert shards < set(weight_map(sharded).values())
    commit = hub_cache(tmp_path, monkeypatch, sharded, ["config.json", INDEX, *shards])
    checkpoint = ModelCheckpoint.open("someone/tiny-llama")
    assert (checkpoint.name, checkpoint.revision) == ("someone/tiny-llama", commit)
    assert load_blocks(checkpoint, Span(1, 2)).num_blocks == 1
    with pytest.raises(CheckpointError, match=r"has no model-.*\.safetensors in the local cache, and the hub cannot"):
        load_blocks(checkpoint, Span(2, 3))
    with pytest.raises(CheckpointError, match="in the local cache"):
        checkpoint.client_tensors()


def test_a_single_file_on_the_hub(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub_cache(tmp_path, monkeypatch, single, ["config.json", "model.safetensors"])
    checkpoint = ModelCheckpoint.open("someone/tiny-llama", revision="main")
    assert checkpoint.revision == commit
    assert len(checkpoint.block_tensors(0)) == 9
    with pytest.raises(CheckpointError, match="someone/tiny-llama at v2 is neither a directory nor in the local cache"):
        ModelCheckpoint.open("someone/tiny-llama", revision="v2")


def test_no_weights_in_the_cache(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_cache(tmp_path, monkeypatch, single, ["config.json"])
    with pytest.raises(HubUnreachable, match=r"has no model\.safetensors in the local cache, and the hub cannot be"):
        ModelCheckpoint.open("someone/tiny-llama")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((path, "does not exist") for path in ("/no/such/model", "./model", "../model", "~/no-such-model", "a/b/c")),
        ("what is this?", "neither a directory nor the name of a model"),
        ("nobody/nothing", "neither a directory nor in the local cache, and the hub cannot be reached"),
        ("nothing", "neither a directory nor in the local cache, and the hub cannot be reached"),
    ],
)
def test_what_is_no_model(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelCheckpoint.open(name)


def test_what_is_not_opened_of_a_directory(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file, expected the directory"):
        ModelCheckpoint.open(sharded / "config.json")
    with pytest.raises(CheckpointError, match="is a directory: revision 'main' is for models on the hub"):
        ModelCheckpoint.open(sharded, revision="main")


Damage = Callable[[Path], object]


def config(edit: Callable[[dict], object]) -> Damage:
    return lambda model: edit_json(model / "config.json", edit)


def write(file: str, content: bytes) -> Damage:
    return lambda model: (model / file).write_bytes(content)


def shard_of(model: Path) -> Path:
    """Return the file that has ``Q_PROJ``."""
    index = model / INDEX
    return model / (weight_map(model)[Q_PROJ] if index.exists() else "model.safetensors")


def cut(kept_bytes: int) -> Damage:
    return lambda model: shard_of(model).write_bytes(shard_of(model).read_bytes()[:kept_bytes])


def without_q_proj(model: Path) -> None:
    edit_tensors(shard_of(model), lambda tensors: tensors.pop(Q_PROJ))


NO_SHARD = r"\.safetensors is (truncated|damaged|no safetensors file)"


@pytest.mark.parametrize(
    ("layout", "damage", "message"),
    [
        ("sharded", lambda model: (model / "config.json").unlink(), r"has no config\.json"),
        ("sharded", write("config.json", b'{"model_type": "llama",'), r"config\.json is no valid JSON"),
        ("sharded", write("config.json", b""), r"config\.json is no valid JSON"),
        ("sharded", write("config.json", b"\x00\x01"), r"config\.json is no valid JSON"),
        ("sharded", write("config.json", b"[1, 2]"), "holds a JSON list, expected an object"),
        ("sharded", config(dict.clear), "does not say its model_type"),
        ("sharded", config(lambda c: c.update(hidden_size="wide")), r"has hidden_size='wide': expected a whole number"),
        ("sharded", config(lambda c: c.update(hidden_act=3)), "does not fit a model of type 'llama'.*hidden_act"),
        ("sharded", config(lambda c: c.update(model_type=["llama"])), r"models of type \['llama'\] are not known"),
        (
            "sharded",
            config(lambda c: c.update(model_type="llama99")),
            "'llama99' are not known to the installed transf",
        ),
        ("single", lambda model: shard_of(model).unlink(), "has no safetensors weights$"),
        (
            "single",
            lambda model: shard_of(model).rename(model / "pytorch_model.bin"),
            r"has no safetensors weights but pytorch_model\.bin: convert it",
        ),
        ("sharded", write(INDEX, b'{"weight_map": 3}'), "no index of shards"),
        ("sharded", lambda model: shard_of(model).unlink(), r"has no model-\d+-of-\d+\.safetensors"),
        *(("sharded", cut(kept_bytes), NO_SHARD) for kept_bytes in (0, 5, 50, -1)),
        *(
            ("sharded", lambda model, data=data: shard_of(model).write_bytes(data), NO_SHARD)
            for data in (b"<html>not found</html>", b"\x10" + bytes(7) + b"{" * 16, bytes(8), b"\xff" * 64)
        ),
        ("sharded", without_q_proj, f"lacks tensor {Q_PROJ}"),
    ],
)
def test_damaged_models_are_not_opened(
    layout: str, damage: Damage, message: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(layout)
    damage(model)
    with pytest.raises((CheckpointError, UnsupportedModel), match=message) as caught:
        ModelCheckpoint.open(model)
    assert "\n" not in str(caught.value)


def test_shard_shrinks_after_opening(sharded: Path) -> None:
    checkpoint = ModelCheckpoint.open(sharded)
    cut(-100)(sharded)
    with pytest.raises(CheckpointError, match=f"{shard_of(sharded).name} is truncated"):
        checkpoint.read(lambda name: True)


@pytest.mark.parametrize(
    ("damage", "blocks", "message"),
    [
        (without_q_proj, "0:3", r"lacks tensor layers\.1\.self_attn\.q_proj\.weight"),
        (config(lambda c: c.update(num_hidden_layers=4)), "2:4", "has no tensors of block 3"),
        (
            lambda model: edit_tensors(shard_of(model), lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)})),
            "1:2",
            r"tensor layers\.1\.self_attn\.q_proj\.weight has shape \[64, 32\], expected \[64, 64\]",
        ),
    ],
)
def test_damaged_blocks_are_not_loaded(single: Path, damage: Damage, blocks: str, message: str) -> None:
    damage(single)
    checkpoint = ModelCheckpoint.open(single)
    with pytest.raises(CheckpointError, match=message):
        load_blocks(checkpoint, Span.parse(blocks))


@pytest.mark.parametrize("edit", ["missing", "shape"])
def test_expert_is_wrong(tmp_path: Path, edit: str) -> None:
    save_checkpoint("mixtral", tmp_path, num_hidden_layers=2, max_shard_size="1GB")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name)
        if edit == "shape":
            tensors[name] = torch.zeros(96, 63)

    edit_tensors(tmp_path / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=r"experts") as caught:
        load_blocks(ModelCheckpoint.open(tmp_path), Span(1, 2))
    assert "\n" not in str(caught.value)
