"""The safetensors files of a checkpoint: which file holds a tensor, and how its weights are packed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from swarm_models.checkpoints.files import CONFIG, CheckpointFiles, FileMissing, HubUnreachable, LocalFiles, is_plain
from swarm_models.checkpoints.formats import forms_of
from swarm_models.checkpoints.formats.packed import PackedForm, find_packed
from swarm_models.checkpoints.safetensors_file import FLOAT8, MAX_NAME, FileTensor, StoredTensor, read_header
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.failures import any_error_as, one_line
from swarm_protocol.untrusted.json_file import read_object, shown
from swarm_protocol.untrusted.numbers import require_model_numbers

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
QUANTIZATION = "quantization_config"  # the key of config.json that says how the weights are packed
MAX_INDEX_BYTES = 64 << 20  # the index files of the largest models have 10 MiB
OLD_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")

# Fields of config.json that do not affect what the model computes.
CONFIG_NOISE = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
# Types whose repositories bring code, though transformers has the same model under another name (see its kimi_k25).
TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}
# Settings that only the repositories' code reads, with the values that transformers' code implements.
ALIAS_SETTINGS = {"kimi_k2": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}}
SAMPLE_BYTES = 4096
SAMPLES_PER_SHARD = 64


class ShardedWeights:
    """The reader of a ``ModelCheckpoint`` whose files are config.json and safetensors."""

    def __init__(self, files: CheckpointFiles) -> None:
        """Read the config and the index; raise CheckpointError, or UnsupportedModel for an unknown model type."""
        self._files = files
        self._raw = read_object(files.path(CONFIG))
        self._forms: tuple[PackedForm, ...] = ()
        if QUANTIZATION in self._raw:
            self._forms = forms_of(self._raw[QUANTIZATION], files.location)
        self.config = _load_config(self._raw, files.path(CONFIG))
        self._shards = self._find_shards()
        self._packed = find_packed(self._shards, self._forms, files.location)
        self._headers: dict[str, dict[str, FileTensor]] = {}
        self.names = tuple(self._packed)

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the files with weights."""
        return tuple(sorted(set(self._shards.values())))

    def unread(self, names: Iterable[str]) -> set[str]:
        """Return the files that hold these tensors and whose headers have not been read yet."""
        return {self._shards[part] for name in names for part in self._parts(name)} - self._headers.keys()

    def pieces(self, name: str) -> list[FileTensor]:
        """Return the tensors of files from which a tensor is made."""
        return [self._in_file(part) for part in self._parts(name)]

    def stored(self, name: str) -> StoredTensor:
        packed = self._packed[name]
        if packed is not None:
            return packed.form.pack(name, {role: self._in_file(part) for role, part in packed.parts.items()})
        stored = self._in_file(name)
        is_full = stored.dtype.is_floating_point and stored.dtype not in FLOAT8
        if self._forms and name.endswith("weight") and not is_full:
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{stored.path} holds {name} as {kind}, but its scale is missing")
        return stored

    def fingerprint(self) -> str:
        """Return a hash of the config, every shard's header, and a few samples of each shard's data.

        The hash is cheap. It changes if training has changed the weights, but may miss a single edited number.
        """
        config = {key: self._raw[key] for key in self._raw.keys() - CONFIG_NOISE if not key.startswith("_")}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        by_shard: dict[str, list[FileTensor]] = {}
        for name, shard in self._shards.items():
            by_shard.setdefault(shard, []).append(self._in_file(name))
        for shard in sorted(by_shard):
            tensors = sorted(by_shard[shard], key=lambda tensor: tensor.offset)
            digest.update(repr([(t.name, str(t.dtype), t.shape, t.offset) for t in tensors]).encode())
            for tensor in tensors[:: -(-len(tensors) // SAMPLES_PER_SHARD)]:  # evenly over the shard
                digest.update(tensor.sample(SAMPLE_BYTES))
        return digest.hexdigest()

    def _parts(self, name: str) -> Collection[str]:
        packed = self._packed[name]
        return [name] if packed is None else packed.parts.values()

    def _in_file(self, name: str) -> FileTensor:
        shard = self._shards[name]
        if shard not in self._headers:
            self._headers[shard] = read_header(self._files.path(shard))
        stored = self._headers[shard].get(name)
        if stored is None:
            raise CheckpointError(f"{self._files.location} lacks tensor {name}: {INDEX} expects it in {shard}")
        return stored

    def _find_shards(self) -> dict[str, str]:
        """Return the file that holds each tensor, by tensor name."""
        try:
            index = self._files.path(INDEX)
        except FileMissing:
            return self._single_shard()
        shards = read_object(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise CheckpointError(f"{index} is no index of shards: it has no weight_map from tensors to files")
        for shard in sorted(set(shards.values())):
            if not is_plain(shard):
                raise CheckpointError(f"{index} names a file {shard[:MAX_NAME]!r}: expected one in the same directory")
        if any(len(name) > MAX_NAME for name in shards):
            raise CheckpointError(f"{index} has names of tensors with more than {MAX_NAME} characters")
        return shards

    def _single_shard(self) -> dict[str, str]:
        try:
            path = self._files.path(SINGLE)
        except HubUnreachable:
            raise  # other sources may have it
        except FileMissing as error:
            if not isinstance(self._files, LocalFiles):
                raise FileMissing(f"{error}: expected safetensors, or one of its GGUF files by --gguf-file") from None
            raise CheckpointError(f"{self._files.location} has no safetensors weights{self._old_weights()}") from error
        return dict.fromkeys(read_header(path), SINGLE)

    def _old_weights(self) -> str:
        old = [path.name for pattern in OLD_WEIGHTS for path in sorted(Path(self._files.location).glob(pattern))]
        return f" but {old[0]}: convert it with save_pretrained of transformers" if old else ""


def _load_config(raw: dict[str, Any], path: Path) -> PreTrainedConfig:
    model_type = written = raw.get("model_type")
    if model_type is None:
        raise CheckpointError(f"{path} does not say its model_type")
    if isinstance(written, str):
        model_type = TYPE_ALIASES.get(written, written)
        for key, expected in ALIAS_SETTINGS.get(written, {}).items():
            if raw.get(key) not in (None, expected):
                raise UnsupportedModel(
                    f"{path} has {key} = {shown(raw[key])}: expected {expected!r} in a model of type {written!r}"
                )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"models of type {model_type!r} are not known to the installed transformers")
    require_model_numbers(raw, path, CONFIG_MAPPING[model_type].attribute_map)

    def refusal(error: Exception) -> CheckpointError:
        return CheckpointError(f"{path} does not fit a model of type {model_type!r}: {one_line(error)}")

    config: PreTrainedConfig
    with any_error_as(refusal):
        if model_type != written:  # AutoConfig would ask for the repository's code
            config = CONFIG_MAPPING[model_type].from_dict({**raw, "model_type": model_type})
        else:
            config = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)  # otherwise transformers' loader would expect packed weights
    return config
