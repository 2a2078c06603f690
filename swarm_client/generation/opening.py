"""The user's choice of a model in a swarm, and the connection to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_client.core.config import ClientConfig
from swarm_models.checkpoints.default_model import FROM_SWARM, check_location, locate
from swarm_protocol.failures import undone_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarm_client.model.hf_model import RemoteModelMixin

_NEED_TOKENS = 64  # room for a short answer


@dataclass(frozen=True)
class ModelChoice:
    """The chosen model and adapter. Construction raises ValueError if the model or the adapter cannot exist.

    Attributes:
        adapter: the name of an adapter that servers have, or the directory of a trained one; empty if there is none.
    """

    model: str
    config: ClientConfig
    revision: str | None = None
    adapter: str = ""

    def __post_init__(self) -> None:
        check_model_name(self.model, self.revision)
        if "/" in self.adapter and not self._is_trained_here:
            raise ValueError(f"adapter {self.adapter} is no directory: expected that of a trained adapter")

    @property
    def _is_trained_here(self) -> bool:
        return bool(self.adapter) and Path(self.adapter).is_dir()

    def connect(self) -> RemoteModelMixin:
        """Connect to the model. Raise SwarmError or ValueError, see ``DistributedModel.from_pretrained``."""
        from swarm_client.adapters.trained import add_trained
        from swarm_client.model.model import DistributedModel

        config = self.config if self._is_trained_here else replace(self.config, adapter=self.adapter)
        model = DistributedModel.from_pretrained(self.model, config=config, revision=self.revision)
        if self._is_trained_here:
            with undone_on_error(model.close):
                add_trained(model, self.adapter)
        return model


def check_model_name(model: str, revision: str | None) -> None:
    """Raise ValueError if there can be no such model, see ``check_location``. A name in the swarm may be anything."""
    if not model.startswith(FROM_SWARM):
        check_location(locate(model), revision)


def tokenizer_of(model: RemoteModelMixin) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the model's own files. Raise CheckpointError if it cannot be read."""
    return tokenizer_at(str(model.name_or_path), model.blocks.swarm.revision)


def tokenizer_at(location: str, revision: str | None) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer. ``revision`` is used only on the hub. Raise CheckpointError if it cannot be read."""
    from swarm_client.generation.generation import load_tokenizer

    is_here = Path(locate(location)).expanduser().exists()  # then the revision is a fingerprint of the files
    return load_tokenizer(location, None if is_here else revision)


def require_chain(model: RemoteModelMixin) -> None:
    """Wait for servers of all blocks. Raise NoRoute or AccessDenied, see ``Swarm.chain``."""
    from swarm_client.core import background

    background.run(model.blocks.swarm.chain(model.blocks.span, _NEED_TOKENS))
