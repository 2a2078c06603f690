"""A model's checkpoint, in a directory or on the hub, of which each peer reads only the tensors it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from swarm_protocol.checkpoints.describing import describe
from swarm_protocol.checkpoints.family import Family
from swarm_protocol.checkpoints.files import CONFIG, Directory, FileMissing, HubModel, is_plain, locate
from swarm_protocol.checkpoints.formats.known import forms_of
from swarm_protocol.checkpoints.formats.packed import PackedForm, find_packed
from swarm_protocol.checkpoints.safetensors_file import FLOAT8, MAX_NAME, FileTensor, StoredTensor, read_header
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.untrusted.json_file import read_object
from swarm_protocol.untrusted.numbers import require_finite, require_model_numbers

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GENERATION_CONFIG = "generation_config.json"
QUANTIZATION = "quantization_config"  # of config.json: how the weights are packed
MAX_INDEX_BYTES = 64 << 20  # those of the largest models have 10 MiB
OLD_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")

# Fields of config.json that say how it was written, not what the model computes.
CONFIG_NOISE = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
FINGERPRINT_HEX = 16
SAMPLE_BYTES = 4096
SAMPLES_PER_SHARD = 64


class Checkpoint:
    """Use ``Checkpoint.open``.

    Attributes:
        name: the hub id, or the last part of the directory's path.
        revision: the hub's commit hash, or for a directory a fingerprint of its config and weights.
        location: the hub id or directory, as ``from_pretrained`` of a tokenizer takes it.
        config: the model's config.
    """

    def __init__(self, files: Directory | HubModel) -> None:
        self._files = files
        self.name, self.location = files.name, files.location
        raw = read_object(files.path(CONFIG))
        self._forms: tuple[PackedForm, ...] = ()
        if QUANTIZATION in raw:
            self._forms = forms_of(raw[QUANTIZATION], files.location)
        self.config = _load_config(raw, files.path(CONFIG))
        self._shards = self._find_shards()
        self._packed = find_packed(self._shards, self._forms, files.location)
        self._headers: dict[str, dict[str, FileTensor]] = {}
        self.revision = self._fingerprint(raw) if isinstance(files, Directory) else files.commit

    @classmethod
    def open(cls, name_or_path: str | Path, revision: str | None = None, token: str | None = None) -> Checkpoint:
        """Reads the config and the list of tensors; no weights yet.

        ``revision`` is a branch, tag or commit of a model on the hub; ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_TOKEN``
        count there as usual. The headers of a directory's shards are read and checked at once, those on the hub when
        their tensors are first asked for.

        Raises:
            CheckpointError: if there is no such checkpoint, or a file of it is missing or damaged.
            UnsupportedModel: if transformers does not know the model type.
        """
        return cls(locate(str(name_or_path), revision, token))

    def __repr__(self) -> str:
        return f"Checkpoint({self.name!r}, revision={self.revision!r})"

    @cached_property
    def family(self) -> Family:
        """How the model splits; raises UnsupportedModel if it does not."""
        return describe(self.config)

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """The model's own generation defaults, if it has any. Raises CheckpointError if they make no sense."""
        try:
            path = self._files.path(GENERATION_CONFIG)
        except FileMissing:
            return None
        raw = read_object(path)
        require_finite(raw, path)
        try:
            return GenerationConfig.from_dict(raw)
        except Exception as error:  # it compares and calls whatever it is given
            raise CheckpointError(f"{path} is no generation config: {_one_line(error)}") from error

    # ------------------------------------------------------------ tensors

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._packed)

    def stored(self, want: Callable[[str], bool]) -> dict[str, StoredTensor]:
        """Where the wanted tensors lie; on the hub, downloads the shards that hold them and no others.

        Weights that are stored packed are unpacked when they are read, one at a time.
        """
        return {name: self._stored(name) for name in self._packed if want(name)}

    def read(self, want: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """Reads the wanted tensors, under their names in the checkpoint and in the dtype they are stored in.

        What is packed is read in full precision.
        """
        return {name: stored.read() for name, stored in self.stored(want).items()}

    def block_tensors(self, index: int) -> dict[str, StoredTensor]:
        """The tensors of one block, not yet read; ``from_pretrained(None, state_dict=…)`` takes them as they are.

        Raises:
            CheckpointError: if the checkpoint has none.
        """
        tensors = self.stored(lambda name: self.family.block_index(name) == index)
        if not tensors:
            raise CheckpointError(f"{self.location} has no tensors of block {index}")
        return tensors

    def client_tensors(self) -> dict[str, StoredTensor]:
        """Every tensor outside the blocks, not yet read: embeddings, norms, heads."""
        return self.stored(lambda name: self.family.block_index(name) is None)

    def block_parameters(self, index: int) -> int:
        """How many parameters block ``index`` has; reads no shard."""
        return self.family.block_parameters[index]

    def require_fit(self, loading_info: Mapping[str, Any], optional: Sequence[str] = ()) -> list[str]:
        """Checks what transformers reports of loading; returns missing tensors whose names begin as in ``optional``.

        Raises:
            CheckpointError: naming a tensor of another shape than the model's, or one that is missing.
        """
        for name, found, expected in sorted(loading_info["mismatched_keys"]):
            raise CheckpointError(
                f"{self.location} does not fit its config: tensor {name} has shape {list(found)}, "
                f"expected {list(expected)}"
            )
        missing = sorted(loading_info["missing_keys"])
        for name in missing:
            if not name.startswith(tuple(optional)):
                raise CheckpointError(f"{self.location} lacks tensor {name}")
        return missing

    def _stored(self, name: str) -> StoredTensor:
        packed = self._packed[name]
        if packed is not None:
            return packed.form.pack(name, {role: self._in_file(part) for role, part in packed.parts.items()})
        stored = self._in_file(name)
        if self._forms and name.endswith("weight") and not _is_full_precision(stored.dtype):
            kind = str(stored.dtype).removeprefix("torch.")
            raise CheckpointError(f"{stored.path} holds {name} as {kind}, but its scale is missing")
        return stored

    def _in_file(self, name: str) -> FileTensor:
        shard = self._shards[name]
        if shard not in self._headers:
            self._headers[shard] = read_header(self._files.path(shard))
        stored = self._headers[shard].get(name)
        if stored is None:
            raise CheckpointError(f"{self.location} lacks tensor {name}: {INDEX} expects it in {shard}")
        return stored

    # ------------------------------------------------------------ opening

    def _find_shards(self) -> dict[str, str]:
        """Which file holds each tensor, by tensor name."""
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
        except FileMissing as error:
            if not isinstance(self._files, Directory):
                raise
            raise CheckpointError(f"{self.location} has no safetensors weights{self._old_weights()}") from error
        return dict.fromkeys(read_header(path), SINGLE)

    def _old_weights(self) -> str:
        old = [path.name for pattern in OLD_WEIGHTS for path in sorted(Path(self.location).glob(pattern))]
        return f" but {old[0]}: convert it with save_pretrained of transformers" if old else ""

    def _fingerprint(self, raw_config: dict[str, Any]) -> str:
        """Hash of the config, every shard's header, and a few samples of each shard's data.

        Cheap, and different for weights that training has changed; not for one edited number.
        """
        config = {key: raw_config[key] for key in raw_config.keys() - CONFIG_NOISE if not key.startswith("_")}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        by_shard: dict[str, list[FileTensor]] = {}
        for name, shard in self._shards.items():
            by_shard.setdefault(shard, []).append(self._in_file(name))
        for shard in sorted(by_shard):
            tensors = sorted(by_shard[shard], key=lambda tensor: tensor.offset)
            digest.update(repr([(t.name, str(t.dtype), t.shape, t.offset) for t in tensors]).encode())
            for tensor in tensors[:: -(-len(tensors) // SAMPLES_PER_SHARD)]:
                digest.update(tensor.sample(SAMPLE_BYTES))
        return digest.hexdigest()[:FINGERPRINT_HEX]


def is_fingerprint(revision: str) -> bool:
    """Return whether a revision is that of a directory, rather than a commit of the hub."""
    return len(revision) == FINGERPRINT_HEX


def _load_config(raw: dict[str, Any], path: Path) -> PreTrainedConfig:
    model_type = raw.get("model_type")
    if model_type is None:
        raise CheckpointError(f"{path} does not say its model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"models of type {model_type!r} are not known to the installed transformers")
    require_model_numbers(raw, path, CONFIG_MAPPING[model_type].attribute_map)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except Exception as error:  # each config class has its own ways to dislike a file
        raise CheckpointError(f"{path} does not fit a model of type {model_type!r}: {_one_line(error)}") from error
    if hasattr(config, QUANTIZATION):
        delattr(config, QUANTIZATION)  # or transformers' loader would expect packed weights
    return config


def _is_full_precision(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype not in FLOAT8


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
