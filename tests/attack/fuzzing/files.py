"""Files of models and adapters, as strangers may have made them: refused by one sentence, or read."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.family import max_positions, rope_depends_on_length, slice_config
from swarm_models.checkpoints.formats.shards import INDEX, SINGLE
from swarm_models.checkpoints.peft_files import read_adapter
from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from tests.attack.fuzzing.mutations import mutated_bytes, mutated_json
from tests.zoo import HIDDEN, make_config, save_checkpoint

_FAMILIES = ("llama", "gpt2", "mixtral", "mamba2")
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_ADAPTER_CONFIG, _ADAPTER = "adapter_config.json", "adapter_model.safetensors"
_MODULE = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


class WrongReading(Exception):
    """A file was refused by more than a sentence."""


class Files:
    """A model of each of some families, and an adapter, in a directory of the fuzzer's own."""

    def __init__(self, directory: Path) -> None:
        logging.getLogger("transformers").setLevel(logging.CRITICAL)  # it reports what makes no sense at length
        warnings.filterwarnings("ignore", module="transformers")
        self._directory = directory
        self._models = {name: directory / name for name in _FAMILIES}
        for name, path in self._models.items():
            save_checkpoint(name, path, max_shard_size="1GB")
        self._adapter = directory / "adapter"
        LoraConfig(
            r=2,
            target_modules=["q_proj"],
            alpha_pattern={"q_proj": 3, r"layers\.\d+\..*": 5},
            rank_pattern={"q_proj": 2},
            lora_dropout=0.1,
            task_type="CAUSAL_LM",
        ).save_pretrained(self._adapter)
        tensors = {_MODULE.format("A"): torch.ones(2, HIDDEN), _MODULE.format("B"): torch.ones(HIDDEN, 2)}
        save_file(tensors, self._adapter / _ADAPTER)
        self._family = describe(make_config("llama"))
        self.kinds: dict[str, Callable[[Random], str]] = {
            "config.json": self._config,
            "index": self._index,
            "safetensors": self._weights,
            "adapter": self._adapter_files,
        }

    def _config(self, chance: Random) -> str:
        model = self._copied(self._models[chance.choice(_FAMILIES)])
        _change(model / chance.choice((_CONFIG, _CONFIG, _CONFIG, _GENERATION)), chance)
        return _tried(lambda: _load(model))

    def _index(self, chance: Random) -> str:
        model = self._copied(self._models["llama"])
        names = list(read_header(model / SINGLE))
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, SINGLE)}
        (model / INDEX).write_text(json.dumps(index))
        _change(model / INDEX, chance)
        return _tried(lambda: _load(model))

    def _weights(self, chance: Random) -> str:
        model = self._copied(self._models["llama"])
        _change_tensors(model / SINGLE, chance)
        return _tried(lambda: _load(model))

    def _adapter_files(self, chance: Random) -> str:
        adapter = self._copied(self._adapter)
        if chance.random() < 0.6:
            _change(adapter / _ADAPTER_CONFIG, chance)
        if chance.random() < 0.5:
            _change_tensors(adapter / _ADAPTER, chance)
        return _tried(lambda: read_adapter(adapter, self._family))

    def _copied(self, source: Path) -> Path:
        """Of this thread alone: one file case is tried at a time."""
        copy = self._directory / "changed"
        shutil.rmtree(copy, ignore_errors=True)
        return shutil.copytree(source, copy)


def _tried(read: Callable[[], Any]) -> str:
    try:
        read()
    except (CheckpointError, UnsupportedModel) as error:
        if "\n" in str(error) or not str(error).isprintable():
            raise WrongReading(f"refused by {str(error)!r}") from None
        return "refused"
    return "read"


def _load(model: Path) -> None:
    checkpoint = ModelCheckpoint.open(model)
    _tried(lambda: checkpoint.generation_config)
    describe(checkpoint.config)
    max_positions(checkpoint.config), rope_depends_on_length(checkpoint.config)
    slice_config(checkpoint.config, Span(0, 1))
    load_blocks(checkpoint, Span(0, 1))


def _change(path: Path, chance: Random) -> None:
    """A file of JSON."""
    if chance.random() < 0.7:
        path.write_text(json.dumps(mutated_json(json.loads(path.read_text()), chance)))
    elif chance.random() < 0.8:
        path.write_bytes(mutated_bytes(path.read_bytes(), chance))
    else:
        path.write_text(chance.choice(('{"a":' * 100_000, "[]", "", "null", '{"a": 1e999}', '"\\ud800"', "[" * 10**6)))


def _change_tensors(path: Path, chance: Random) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.6:
        header = json.dumps(mutated_json(json.loads(data[8 : 8 + length]), chance)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    elif chance.random() < 0.5:
        path.write_bytes(mutated_bytes(data[: 8 + length], chance) + data[8 + length :])
    else:
        path.write_bytes(mutated_bytes(data, chance))
