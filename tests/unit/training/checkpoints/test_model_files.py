"""Servable checkpoints: transformers and servers load them as models, and the run gets back every bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.errors import CheckpointError
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_training.checkpoints import model_files
from swarm_training.checkpoints.checkpoint import Checkpoint, read, write
from swarm_training.checkpoints.model_files import ServableModel, is_servable
from tests.unit.training.checkpoints.test_checkpoint import assert_equal
from tests.zoo import BLOCKS, make_config

TOKENS = torch.arange(8)[None]


def stock(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(family)).eval()


def content(model: PreTrainedModel) -> Checkpoint:
    return Checkpoint("run", 3, model.state_dict(), {"state": {0: {"exp_avg": torch.ones(3)}}}, {"rate": 0.1 + 0.2})


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_model_computes_the_same_bits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 has tied weights; Mixtral is written under other names, with a tensor for each expert. Both in shards."""
    monkeypatch.setattr(model_files, "_SHARD_SIZE", "200KB")
    model, directory = stock(family), tmp_path / "one"
    saved = content(model)
    write(saved, directory, ServableModel(model))
    assert (directory / "model.safetensors.index.json").exists() and (directory / "config.json").exists()
    served = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(served(TOKENS).logits, model(TOKENS).logits)
    found = read(directory)
    assert_equal(dict(sorted(found.parameters.items())), dict(sorted(saved.parameters.items())))
    assert_equal((found.optimizer, found.scheduler), (saved.optimizer, saved.scheduler))
    load_blocks(ModelCheckpoint.open(directory), Span(0, BLOCKS))  # as a server does
    number = sum(len(load_file(path)) for path in directory.glob("*.safetensors"))
    own = {(each.data_ptr(), each.shape) for each in model.state_dict().values()}
    assert number == len(own) or family == "mixtral"  # nothing is stored twice


def test_weights_of_several_kinds_keep_theirs(tmp_path: Path) -> None:
    model = stock("mixtral")
    model.lm_head.bfloat16()
    write(saved := content(model), tmp_path / "one", ServableModel(model))
    assert_equal(dict(sorted(read(tmp_path / "one").parameters.items())), dict(sorted(saved.parameters.items())))


def test_a_tokenizer_comes_with_it(tmp_path: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(locate(DEFAULT_MODEL)), stock("llama")
    write(content(model), tmp_path / "one", ServableModel(model, tokenizer))
    assert AutoTokenizer.from_pretrained(tmp_path / "one")("def f").input_ids == tokenizer("def f").input_ids


def test_what_transformers_does_not_write_whole_is_not_servable() -> None:
    model = stock("llama")
    assert is_servable(model) and not is_servable(torch.nn.Linear(1, 1))
    model._hf_peft_config_loaded = True
    assert not is_servable(model)


def changed(**facts: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "training" / "checkpoint.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return change


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(change((directory / name).read_bytes()))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (replaced("model.safetensors", lambda data: data[:-1]), r"model\.safetensors is damaged: its hash is not"),
        (replaced("config.json", lambda data: data + b" "), r"config\.json is damaged: its hash is not"),
        (lambda directory: (directory / "config.json").unlink(), r"config\.json cannot be read: No such file"),
        (replaced("training/state.safetensors", lambda data: data[:-1]), r"state\.safetensors is damaged"),
        (replaced("training/checkpoint.json", lambda data: data[:-1]), r"checkpoint\.json is no valid JSON"),
        (changed(version=1), "is of version 1: expected 2"),
        (changed(files={}), r"state\.safetensors is not among the files"),
        (changed(files={"../x": ""}), r"names a file '\.\./x': expected one in"),
        (changed(state=[]), "has no state of an optimizer"),
        (changed(model={"aliases": {"a": "b"}}), "lacks a tensor"),
        (changed(model={"dtype": "int8"}), r"architectures=.*: expected a model of transformers"),
        (changed(in_averaged={"a": "b"}), "has no tensor|has architectures|cannot be read"),
        (changed(trained=0), "has trained=0: expected a list"),
    ],
)
def test_damage_is_named(harm: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    model = stock("llama")
    write(content(model), tmp_path / "one", ServableModel(model))
    harm(tmp_path / "one")
    with pytest.raises(CheckpointError, match=reason):
        read(tmp_path / "one")
