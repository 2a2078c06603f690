"""A model's checkpoint, in a directory or on the hub, of which each peer reads only the tensors it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from swarm_protocol.checkpoints.describing import describe
from swarm_protocol.checkpoints.family import Family
from swarm_protocol.checkpoints.files import CheckpointFiles, FileMissing, locate
from swarm_protocol.checkpoints.formats.shards import ShardedWeights
from swarm_protocol.checkpoints.gguf.weights import GgufWeights
from swarm_protocol.checkpoints.safetensors_file import StoredTensor
from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.json_file import read_object
from swarm_protocol.untrusted.numbers import require_finite

GENERATION_CONFIG = "generation_config.json"
FINGERPRINT_HEX = 16


class Checkpoint:
    """Use ``Checkpoint.open``, or give the files.

    Attributes:
        name: the hub id, with the name of the GGUF file if there is one; or the last part of the path.
        revision: the hub's commit hash, or for a directory or a GGUF file a fingerprint of its config and weights.
        location: the hub id or the path, as it was given.
        files: where its files come from.
        config: the model's config.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.name, self.location = files.name, files.location
        self._weights = ShardedWeights(files) if files.gguf is None else GgufWeights(files, files.gguf)
        self.config = self._weights.config
        self.revision = files.commit or self._weights.fingerprint()[:FINGERPRINT_HEX]

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
        if self.files.gguf is not None:
            return None  # one that lies beside the file is another model's
        try:
            path = self.files.path(GENERATION_CONFIG)
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
    def weight_files(self) -> tuple[str, ...]:
        """The names of the files that hold the tensors."""
        return self._weights.files

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return self._weights.names

    def stored(self, want: Callable[[str], bool]) -> dict[str, StoredTensor]:
        """Where the wanted tensors lie; downloads the shards that hold them from the hub, their bytes from a swarm.

        Weights that are stored packed are unpacked when they are read, one at a time.
        """
        wanted = [name for name in self.tensor_names if want(name)]
        self.files.fetch_headers(self._weights.unread(wanted))
        found = {name: self._weights.stored(name) for name in wanted}
        self.files.fetch(piece for tensor in found.values() for piece in tensor.pieces)
        return found

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


def is_fingerprint(revision: str) -> bool:
    """Return whether a revision is that of a directory, rather than a commit of the hub."""
    return len(revision) == FINGERPRINT_HEX


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
