"""A model's checkpoint, in a directory or on the hub: each peer reads only the tensors that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.family import Family, text_config
from swarm_models.checkpoints.files import CheckpointFiles, FileMissing, locate
from swarm_models.checkpoints.formats.shards import ShardedWeights
from swarm_models.checkpoints.gguf.weights import GgufWeights
from swarm_models.checkpoints.safetensors_file import StoredTensor
from swarm_protocol.errors import CheckpointError
from swarm_protocol.failures import any_error_as, one_line
from swarm_protocol.untrusted.json_file import read_object
from swarm_protocol.untrusted.numbers import require_finite

GENERATION_CONFIG = "generation_config.json"
FINGERPRINT_HEX = 16


class ModelCheckpoint:
    """A checkpoint, usually created by ``ModelCheckpoint.open``.

    Attributes:
        name: the hub id, followed by the name of the GGUF file if there is one; or the last part of the path.
        location: the hub id or the path, as the user gave it.
        whole_config: the config in the checkpoint, which may also describe a vision tower, such as ``LlavaConfig``.
        config: the config of the language model, such as ``LlamaConfig``; often the same as ``whole_config``.
        revision: the hub's commit hash; for a directory or a GGUF file, a fingerprint of its config and weights.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        self.name, self.location = files.name, files.location
        self._weights = ShardedWeights(files) if files.gguf is None else GgufWeights(files, files.gguf)
        self.whole_config = self._weights.config
        self.config = text_config(self.whole_config)
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
        with any_error_as(lambda error: CheckpointError(f"{path} is no generation config: {one_line(error)}")):
            return GenerationConfig.from_dict(raw)

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
        # Before ``stored``, which may read small parts, such as the quant_state of bitsandbytes, to check the others.
        self.files.fetch(piece for name in wanted for piece in self._weights.pieces(name))
        return {name: self._weights.stored(name) for name in wanted}

    def read(self, want: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """Read the wanted tensors, under their names in the checkpoint and in the dtype in which they are stored.

        Packed weights are read in full precision.
        """
        return {name: stored.read() for name, stored in self.stored(want).items()}

    def block_index(self, tensor_name: str) -> int | None:
        """Return the index of the block that a tensor of this checkpoint belongs to; None for all other tensors."""
        before = self._before_blocks
        if before is not None and not tensor_name.startswith(f"{before}{self.family.blocks}."):
            return None
        return self.family.block_index(tensor_name)

    def block_tensors(self, index: int) -> dict[str, StoredTensor]:
        """Return the unread tensors of one block, under names that the base model's ``from_pretrained`` accepts.

        Raises:
            CheckpointError: the checkpoint has no tensors of this block.
        """
        tensors = self.stored(lambda name: self.block_index(name) == index)
        if not tensors:
            raise CheckpointError(f"{self.location} has no tensors of block {index}")
        before, owner = self._before_blocks, self.family.owner
        if before is None:
            return tensors
        # ``owner`` is empty if the base model itself has the blocks: no name may begin with a dot.
        return {f"{owner}.{name[len(before) :]}".lstrip("."): tensor for name, tensor in tensors.items()}

    def client_tensors(self) -> dict[str, StoredTensor]:
        """Return every tensor outside the blocks, not yet read: embeddings, norms, heads, vision towers."""
        return self.stored(lambda name: self.block_index(name) is None)

    @cached_property
    def _before_blocks(self) -> str | None:
        """Return the prefix of the names of the language model's blocks; None if all blocks are the language model's.

        Vision towers have lists of blocks too, often under the same name. The language model's list is the one whose
        blocks have most of the linear layers that the family has.
        """
        if self.config is self.whole_config:
            return None
        linears = {name for name, _ in self.family.linears[0]}
        found: dict[str, set[str]] = {}
        for name in self.tensor_names:
            before, blocks, inside = name.rpartition(f"{self.family.blocks}.0.")
            if blocks and (not before or before.endswith(".")):
                found.setdefault(before, set()).add(inside.removesuffix(".weight"))
        if not found:
            raise CheckpointError(f"{self.location} has no tensors of block 0")
        return max(found, key=lambda before: len(found[before] & linears))

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
