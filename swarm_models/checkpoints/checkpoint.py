"""A model's checkpoint, in a directory or on the hub: each peer reads only the tensors that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.files import CheckpointFiles, FileMissing, locate
from swarm_models.checkpoints.formats.shards import ShardedWeights
from swarm_models.checkpoints.gguf.weights import GgufWeights
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import read_object
from swarm_protocol.untrusted.numbers import require_finite

GENERATION_CONFIG = "generation_config.json"
FINGERPRINT_HEX = 16


class ModelCheckpoint:
    """A checkpoint, usually created by ``ModelCheckpoint.open``.

    Attributes:
        files: the source of the checkpoint's files.
        name: the hub id, followed by the name of the GGUF file if there is one; or the last part of the path.
        location: the hub id or the path, as the user gave it.
        config: the model's config.
        revision: the hub's commit hash; for a directory or a GGUF file, a fingerprint of its config and weights.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.name, self.location = files.name, files.location
        self._weights = ShardedWeights(files) if files.gguf is None else GgufWeights(files, files.gguf)
        self.config = self._weights.config
        self.revision = files.commit or self._weights.fingerprint()[:FINGERPRINT_HEX]

    @classmethod
    def open(cls, name_or_path: str | Path, revision: str | None = None, token: str | None = None) -> ModelCheckpoint:
        """Read the config and the list of tensors, but no weights yet.

        ``revision`` is a branch, tag or commit of a model on the hub. ``HF_HUB_OFFLINE``, ``HF_HOME`` and ``HF_TOKEN``
        work there as usual. The shard headers of a directory are read and checked at once; those of a hub model are
        read when their tensors are first requested.

        Raises:
            CheckpointError: there is no such checkpoint, or one of its files is missing or damaged.
            UnsupportedModel: transformers does not know the model type.
        """
        return cls(locate(str(name_or_path), revision, token))

    def __repr__(self) -> str:
        return f"ModelCheckpoint({self.name!r}, revision={self.revision!r})"

    @cached_property
    def family(self) -> Family:
        """Return how the model splits; raise UnsupportedModel if it does not split."""
        return describe(self.config)

    @cached_property
    def generation_config(self) -> GenerationConfig | None:
        """Return the model's own generation defaults, or None; raise CheckpointError if they are invalid."""
        if self.files.gguf is not None:
            return None  # a file beside the GGUF file would belong to another model
        try:
            path = self.files.path(GENERATION_CONFIG)
        except FileMissing:
            return None
        raw = read_object(path)
        require_finite(raw, path)
        try:
            return GenerationConfig.from_dict(raw)
        except Exception as error:  # transformers may raise any type here: it compares and calls the values it is given
            raise CheckpointError(f"{path} is no generation config: {_one_line(error)}") from error

    # ------------------------------------------------------------ tensors

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Return the names of the files that hold the tensors."""
        return self._weights.files

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return self._weights.names

    def stored(self, want: Callable[[str], bool]) -> dict[str, StoredTensor]:
        """Return where the wanted tensors lie, once the hub shards that hold them, or their bytes, are there.

        Packed weights are unpacked when they are read, one tensor at a time.
        """
        wanted = [name for name in self.tensor_names if want(name)]
        self.files.fetch_headers(self._weights.unread(wanted))
        found = {name: self._weights.stored(name) for name in wanted}
        self.files.fetch(piece for tensor in found.values() for piece in tensor.pieces)
        return found

    def read(self, want: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """Read the wanted tensors, under their names in the checkpoint and in the dtype in which they are stored.

        Packed weights are read in full precision.
        """
        return {name: stored.read() for name, stored in self.stored(want).items()}

    def block_tensors(self, index: int) -> dict[str, StoredTensor]:
        """Return the unread tensors of one block; ``from_pretrained(None, state_dict=…)`` accepts them as they are.

        Raises:
            CheckpointError: the checkpoint has no tensors of this block.
        """
        tensors = self.stored(lambda name: self.family.block_index(name) == index)
        if not tensors:
            raise CheckpointError(f"{self.location} has no tensors of block {index}")
        return tensors

    def client_tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor outside the blocks, not yet read: embeddings, norms, heads."""
        return self.stored(lambda name: self.family.block_index(name) is None)

    def block_parameters(self, index: int) -> int:
        """Return the number of parameters of block ``index``, without reading a shard."""
        return self.family.block_parameters[index]

    def require_fit(self, loading_info: Mapping[str, Any], optional: Sequence[str] = ()) -> list[str]:
        """Check transformers' loading report; return the missing tensors whose names begin with an ``optional`` prefix.

        Raises:
            CheckpointError: a tensor has another shape than the model's, or a required tensor is missing.
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


def is_fingerprint(revision: str) -> bool:
    """Return whether a revision is the fingerprint of a directory or GGUF file, not a commit of the hub."""
    return len(revision) == FINGERPRINT_HEX


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
