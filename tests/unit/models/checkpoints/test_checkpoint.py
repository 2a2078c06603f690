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


# ---------------------------------------------------------------- what it reads


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


def test_block_parameters_agree_with_the_shards(sharded: Path) -> None:
    checkpoint = ModelCheckpoint.open(sharded)
    for index in range(3):
        assert checkpoint.block_parameters(index) == sum(
            t.read().numel() for t in checkpoint.block_tensors(index).values()
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


# ---------------------------------------------------------------- fingerprint of a directory


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


# ---------------------------------------------------------------- the hub, by way of its local cache


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


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing"])
def test_unreachable_hub(name: str) -> None:
    with pytest.raises(
        CheckpointError, match="neither a directory nor in the local cache, and the hub cannot be reached"
    ):
        ModelCheckpoint.open(name)


# ---------------------------------------------------------------- what can be wrong


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model", "~/no-such-model", "a/b/c"])
def test_missing_path(path: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelCheckpoint.open(path)


def test_name_that_cannot_be_a_model() -> None:
    with pytest.raises(CheckpointError, match="neither a directory nor the name of a model"):
        ModelCheckpoint.open("what is this?")


def test_file_instead_of_directory(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file, expected the directory"):
        ModelCheckpoint.open(sharded / "config.json")


def test_revision_of_a_directory(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="is a directory: revision 'main' is for models on the hub"):
        ModelCheckpoint.open(sharded, revision="main")


def test_no_config(sharded: Path) -> None:
    (sharded / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelCheckpoint.open(sharded)


@pytest.mark.parametrize("text", ['{"model_type": "llama",', "", "\x00\x01"])
def test_config_is_no_json(sharded: Path, text: str) -> None:
    (sharded / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json is no valid JSON"):
        ModelCheckpoint.open(sharded)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda config: config.clear(), "does not say its model_type"),
        (
            lambda config: config.update(hidden_size="wide"),
            r"config\.json has hidden_size='wide': expected a whole number",
        ),
        (lambda config: config.update(hidden_act=3), "does not fit a model of type 'llama'.*hidden_act"),
        (lambda config: config.update(model_type=["llama"]), r"models of type \['llama'\] are not known"),
    ],
)
def test_config_makes_no_sense(sharded: Path, edit: Callable, message: str) -> None:
    edit_json(sharded / "config.json", edit)
    with pytest.raises((CheckpointError, UnsupportedModel), match=message) as caught:
        ModelCheckpoint.open(sharded)
    assert "\n" not in str(caught.value)


def test_config_is_a_list(sharded: Path) -> None:
    (sharded / "config.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="holds a JSON list, expected an object"):
        ModelCheckpoint.open(sharded)


def test_unknown_model_type(sharded: Path) -> None:
    edit_json(sharded / "config.json", lambda config: config.update(model_type="llama99"))
    with pytest.raises(UnsupportedModel, match="'llama99' are not known to the installed transformers"):
        ModelCheckpoint.open(sharded)


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no safetensors weights$"):
        ModelCheckpoint.open(single)


def test_only_pickled_weights(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no safetensors weights but pytorch_model\.bin: convert it"):
        ModelCheckpoint.open(single)


def test_index_is_damaged(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="no index of shards"):
        ModelCheckpoint.open(sharded)


def test_shard_is_missing(sharded: Path) -> None:
    shard = weight_map(sharded)[Q_PROJ]
    (sharded / shard).unlink()
    with pytest.raises(CheckpointError, match=f"has no {shard}"):
        ModelCheckpoint.open(sharded)


@pytest.mark.parametrize("kept_bytes", [0, 5, 50, -1])
def test_shard_is_truncated(sharded: Path, kept_bytes: int) -> None:
    shard = sharded / weight_map(sharded)[Q_PROJ]
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is (truncated|no safetensors file)"):
        ModelCheckpoint.open(sharded)


@pytest.mark.parametrize("content", [b"<html>not found</html>", b"\x10" + bytes(7) + b"{" * 16, bytes(8), b"\xff" * 64])
def test_shard_is_something_else(sharded: Path, content: bytes) -> None:
    shard = sharded / weight_map(sharded)[Q_PROJ]
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{shard.name} is (truncated|damaged|no safetensors file)"):
        ModelCheckpoint.open(sharded)


def test_shard_shrinks_after_opening(sharded: Path) -> None:
    checkpoint = ModelCheckpoint.open(sharded)
    shard = sharded / weight_map(sharded)[Q_PROJ]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        checkpoint.read(lambda name: True)


def test_tensor_is_missing_in_its_shard(sharded: Path) -> None:
    edit_tensors(sharded / weight_map(sharded)[Q_PROJ], lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(CheckpointError, match=f"lacks tensor {Q_PROJ}"):
        ModelCheckpoint.open(sharded)


def test_tensor_is_missing(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.pop(Q_PROJ))
    checkpoint = ModelCheckpoint.open(single)
    with pytest.raises(CheckpointError, match=r"lacks tensor layers\.1\.self_attn\.q_proj\.weight"):
        load_blocks(checkpoint, Span(0, 3))


def test_block_is_missing(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(num_hidden_layers=4))
    checkpoint = ModelCheckpoint.open(single)
    with pytest.raises(CheckpointError, match="has no tensors of block 3"):
        load_blocks(checkpoint, Span(2, 4))


def test_tensor_has_the_wrong_shape(single: Path) -> None:
    edit_tensors(single / "model.safetensors", lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    checkpoint = ModelCheckpoint.open(single)
    with pytest.raises(
        CheckpointError, match=r"tensor layers\.1\.self_attn\.q_proj\.weight has shape \[64, 32\], expected \[64, 64\]"
    ):
        load_blocks(checkpoint, Span(1, 2))


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
