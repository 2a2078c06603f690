"""Which model of a swarm is to write, and the connection to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_client.core.config import ClientConfig
from swarm_protocol.checkpoints.default_model import check_location, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from swarm_client.model.hf_model import RemoteModelMixin

_NEED_TOKENS = 64  # room for a short answer


@dataclass(frozen=True)
class ModelChoice:
    """Raises ValueError at construction if there can be no such model or adapter.

    Attributes:
        model: name on the hub, or directory.
        adapter: name of one that servers have, or directory of one that was trained; empty: none.
        config: how the swarm is joined.
    """

    model: str
    config: ClientConfig
    revision: str | None = None
    adapter: str = ""

    def __post_init__(self) -> None:
        check_location(locate(self.model), self.revision)
        if "/" in self.adapter and not self._is_trained_here:
            raise ValueError(f"adapter {self.adapter} is no directory: expected that of a trained adapter")

    @property
    def _is_trained_here(self) -> bool:
        return bool(self.adapter) and Path(self.adapter).is_dir()

    def connect(self) -> RemoteModelMixin:
        """Raises SwarmError and ValueError, see ``DistributedModel.from_pretrained``."""
        from swarm_client.adapters.trained import add_trained
        from swarm_client.model.model import DistributedModel

        config = self.config if self._is_trained_here else replace(self.config, adapter=self.adapter)
        model = DistributedModel.from_pretrained(self.model, config=config, revision=self.revision)
        if self._is_trained_here:
            try:
                add_trained(model, self.adapter)
            except BaseException:
                model.close()
                raise
        return model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises CheckpointError."""
        from swarm_client.generation.generation import load_tokenizer

        return load_tokenizer(self.model, self.revision)


def require_chain(model: RemoteModelMixin) -> None:
    """Waits for servers of all blocks. Raises NoRoute, AccessDenied: see ``Swarm.chain``."""
    from swarm_client.core import background

    background.run(model.blocks.swarm.chain(model.blocks.span, _NEED_TOKENS))
