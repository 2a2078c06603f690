"""The weights of a GGUF file under transformers' names, each unpacked when it is read."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig

from swarm_models.checkpoints.files import CheckpointFiles
from swarm_models.checkpoints.formats.packed import PackedTensor
from swarm_models.checkpoints.gguf.header import TYPES, GgufHeader, GgufTensor, read_header
from swarm_models.checkpoints.gguf.names import ModelNames, model_names
from swarm_models.checkpoints.gguf.rope import FACTORS, OTHER_FACTORS, missing_rope
from swarm_models.checkpoints.safetensors_file import FileTensor, StoredTensor
from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_protocol.failures import any_error_as, one_line
from swarm_protocol.untrusted.numbers import require_model_numbers

_SHARD = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)")
_MAX_SHARDS = 1024
_ALWAYS_TIED = ("bloom", "falcon")  # transformers takes their heads from their embeddings
_GEMMA2_27B_LAYERS = 46  # the only gemma2 with another scale of attention
# Settings that GGUF files do not contain, each with the end of a tensor's name that is there only if they are true:
_BIASES = {"attention_bias": ".attn_q.bias", "mlp_bias": ".ffn_down.bias"}
_TILE = 1 << 16  # how many numbers are unpacked at a time
_SAMPLE_BYTES = 4096
# Classes of transformers that change matrices row by row. Tensors with one of these marks in their names are changed
# head by head; the config has their number of heads under the name beside the mark.
_ROW_BY_ROW: dict[str, dict[str, str]] = {
    "TensorProcessor": {},
    "LlamaTensorProcessor": {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"},
    "Qwen2MoeTensorProcessor": {},
    "MiniMaxM2TensorProcessor": {},
    "Gemma2TensorProcessor": {},
}


class GgufWeights:
    """The reader of a ``ModelCheckpoint`` that is a GGUF file, or the shards of one.

    Attributes:
        names: the names of the model's tensors that the file holds.
    """

    def __init__(self, files: CheckpointFiles, name: str) -> None:
        """Open the file ``name``; raise CheckpointError, or UnsupportedModel if transformers has no table for it."""
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"{name} is a GGUF file, which needs one more package: pip install 'swarm-lm[gguf]'")
        self._files, self._path = files, files.path(name)
        first = read_header(self._path)
        self.files = (name, *_other_shards(name, first))
        self._headers = [first, *(read_header(files.path(other)) for other in self.files[1:])]
        stored = {key: tensor for header in self._headers for key, tensor in header.tensors.items()}
        if not first.architecture:
            raise CheckpointError(f"{self._path} is damaged: it does not say its general.architecture")
        self.config = _read_config(self._path, first)
        if "output.weight" in stored and first.architecture not in _ALWAYS_TIED:
            self.config.update({"tie_word_embeddings": False})  # transformers looks for it in the first file only
        with_biases = {
            setting: True
            for setting, end in _BIASES.items()
            if hasattr(self.config, setting) and any(key.endswith(end) for key in stored)
        }
        self.config.update(with_biases)
        self.config.update(missing_rope(self.config, first, self._path))
        with any_error_as(partial(_unsupported, self._path)):
            self._model = model_names(self.config, first.architecture)
        self._parts: dict[str, dict[str, GgufTensor]] = {}
        name_of = self._model.of_gguf
        for key, tensor in stored.items():
            full = name_of.get(key) or name_of.get(key.removesuffix(".weight"))  # the names of experts lack this suffix
            if full is not None:
                self._parts.setdefault(full, {})[key] = tensor
            elif key not in (FACTORS, *OTHER_FACTORS, "output.weight"):  # the head of a model that ties it
                raise UnsupportedModel(f"{self._path} holds {key}, which the installed transformers does not read")
        lacking = [name for name in self._model.shapes if name.endswith(".bias") and name not in self._parts]
        if with_biases and lacking:
            raise UnsupportedModel(f"{self._path} has biases, but lacks {lacking[0]}")
        self.names = tuple(self._parts)

    def unread(self, _names: Iterable[str]) -> set[str]:
        """Return the empty set: all headers were read at once."""
        return set()

    def pieces(self, name: str) -> list[FileTensor]:
        """Return the tensors of files from which a tensor is made."""
        return [part.rows for part in self._parts[name].values()]

    def stored(self, name: str) -> StoredTensor:
        parts, shape = self._parts[name], self._model.shapes[name]
        if sum(prod(part.shape) for part in parts.values()) != prod(shape):
            found = " and ".join(str(list(part.shape)) for part in parts.values())
            raise CheckpointError(f"{self._path} holds {name} with shape {found}, expected {list(shape)}")
        types = tuple((key, part.type, part.shape) for key, part in parts.items())
        unpack = partial(_unpack, name=name, shape=shape, types=types, model=self._model)
        rows = {key: part.rows for key, part in parts.items()}
        return PackedTensor(name, torch.float32, shape, rows, unpack, *self._tiling(rows, shape))

    def _tiling(self, rows: Mapping[str, FileTensor], shape: Sequence[int]) -> tuple[dict[str, Fraction], int]:
        """Return ``part_rows`` and ``unit_rows`` for ``PackedTensor``; the first is empty if there can be no tiles."""
        heads_of = _ROW_BY_ROW.get(type(self._model.processor).__name__)
        num_rows, *inner = shape
        ratios = {key: Fraction(part.shape[0], num_rows) for key, part in rows.items()}
        if heads_of is None or not inner or any(ratio.denominator > 1 for ratio in ratios.values()):
            return {}, 1
        heads = {self._model.processor.config.get(heads_of[mark]) for mark in heads_of for key in rows if mark in key}
        if not heads:
            return ratios, 1
        (num_heads,) = heads
        # A tile has whole heads, because the processor reorders rows within a head.
        return (ratios, num_rows // num_heads) if num_heads and num_rows % num_heads == 0 else ({}, 1)

    def fingerprint(self) -> str:
        """Return a hash of the header's values and a sample of each tensor's data."""
        digest = hashlib.sha256()
        for header in self._headers:
            digest.update(repr(sorted(header.values.items())).encode())
            for name, tensor in sorted(header.tensors.items()):
                digest.update(repr((name, tensor.type, tensor.shape, tensor.rows.offset)).encode())
                digest.update(tensor.rows.sample(_SAMPLE_BYTES))
        return digest.hexdigest()


def _other_shards(name: str, first: GgufHeader) -> list[str]:
    """Return the names of the other shards that belong to the first one."""
    count = first.values.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return []
    match = _SHARD.fullmatch(name)
    if match is None or int(match[4]) != count or count > _MAX_SHARDS or int(match[2]) != 1:
        raise CheckpointError(f"{name} is one of {count} files: expected the first, with -00001-of-{count:05d}.gguf")
    return [f"{match[1]}{number:05d}{match[3]}" for number in range(2, count + 1)]


def _read_config(path: Path, header: GgufHeader) -> PreTrainedConfig:
    with any_error_as(partial(_unsupported, path)):
        config: PreTrainedConfig = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    expert_size = header.values.get(f"{header.architecture}.expert_feed_forward_length")
    if expert_size is not None and hasattr(config, "moe_intermediate_size"):
        config.update({"moe_intermediate_size": expert_size})  # transformers keeps its default
    if config.model_type == "mistral":  # a file of llama.cpp's architecture "llama", by its name alone
        config.update({"sliding_window": None})  # llama.cpp attends to all positions; the default would be 4096
    if config.model_type == "gemma2" and config.num_hidden_layers == _GEMMA2_27B_LAYERS:
        scalar = config.hidden_size // config.num_attention_heads  # the file does not contain it
        config.update({"query_pre_attn_scalar": scalar})
    require_model_numbers(json.loads(config.to_json_string()), path, type(config).attribute_map)
    return config


def _unsupported(path: Path, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(f"{path} cannot be read by the installed transformers: {one_line(error)}")


# ---------------------------------------------------------------- one tensor


def _unpack(
    *,
    name: str,
    shape: tuple[int, ...],
    types: tuple[tuple[str, int, tuple[int, ...]], ...],
    model: ModelNames,
    **rows: torch.Tensor,
) -> torch.Tensor:
    """Unpack all rows or some. rows: [rows, bytes of a row] of each part, by llama.cpp's names.

    Fused experts of transformers have two parts, gate and up.
    """
    unpacked: dict[str, torch.Tensor] = {}
    for key, type_, part_shape in types:
        values = _dequantize(rows.pop(key), type_).reshape(-1, *part_shape[1:])
        with any_error_as(partial(_does_not_fit, key, part_shape)):
            done = model.processor_for(Fraction(len(values), part_shape[0])).process(
                weights=values, name=key, tensor_key_mapping=model.of_gguf, parsed_parameters={"tensors": unpacked}
            )
        if done.name is not None:  # otherwise the processor has written into ``unpacked``
            unpacked[name] = torch.from_numpy(np.ascontiguousarray(done.weights, dtype=np.float32))
    if unpacked.keys() != {name} or len(unpacked[name].shape) != len(shape) or unpacked[name].shape[1:] != shape[1:]:
        found = {key: list(tensor.shape) for key, tensor in unpacked.items()}
        raise CheckpointError(f"tensor {name} was expected with shape {list(shape)}, and is {found}")
    return unpacked[name]


def _does_not_fit(key: str, shape: Sequence[int], error: Exception) -> CheckpointError:
    return CheckpointError(f"tensor {key} has shape {list(shape)}, which does not fit: {error}")


def _dequantize(rows: torch.Tensor, type_: int) -> np.ndarray[Any, Any]:
    """Dequantize [rows, bytes of a row] uint8 -> [rows, numbers of a row] fp32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    _, block, block_bytes = TYPES[type_]
    stored = rows.numpy()
    values = np.empty((stored.shape[0], stored.shape[1] // block_bytes * block), dtype=np.float32)
    tile_rows = max(1, _TILE // max(1, values.shape[1]))
    for start in range(0, len(stored), tile_rows):  # in tiles, because dequantize makes several copies of its input
        tile = slice(start, start + tile_rows)
        values[tile] = dequantize(stored[tile], GGMLQuantizationType(type_))
    return values
