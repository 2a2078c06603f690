"""The same model twice: whole in this process, and through servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client import ClientConfig, DistributedModel
from swarm_client.drafts import opening
from swarm_client.swarm.caller import ClientIdentity
from swarm_protocol.dht.dht import Dht
from tests.swarm.harness import InProcessServers
from tests.zoo import VOCAB, save_checkpoint

NEW_TOKENS = 12


@dataclass(frozen=True)
class Pair:
    """The whole model in this process, and the same model through servers."""

    whole: PreTrainedModel
    remote: PreTrainedModel
    servers: InProcessServers

    def both(self, input_ids: torch.Tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of both models, from the same random state."""
        options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": NEW_TOKENS, **options}
        tokens = []
        for model in (self.whole, self.remote):
            torch.manual_seed(3)
            tokens.append(model.generate(input_ids, **options))
        return tokens[0], tokens[1]


def ends_only_at_its_length(model: PreTrainedModel) -> PreTrainedModel:
    if model.can_generate():
        model.generation_config.eos_token_id = None
    return model.eval()


@contextmanager
def hosted(
    directory: Path, *spans: str, name: str = "llama", config: dict[str, Any] | None = None, **options: Any
) -> Iterator[InProcessServers]:
    """Servers of these spans of a zoo member, which is saved in ``directory``.

    Args:
        config: arguments of ``save_checkpoint``.
        options: of the servers' config.
    """
    save_checkpoint(name, directory, **(config or {}))
    with InProcessServers(directory, memory_dht=True) as servers:
        servers.start(*spans, **options)
        yield servers


@contextmanager
def started(directory: Path, *spans: str, **options: Any) -> Iterator[Pair]:
    """Servers as ``hosted`` starts them, a client of them, and the whole model."""
    with hosted(directory, *spans, **options) as servers, connected(servers) as remote:
        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        yield Pair(ends_only_at_its_length(whole), remote, servers)


@contextmanager
def connected(servers: InProcessServers, kind: Any = DistributedModel, **options: Any) -> Iterator[PreTrainedModel]:
    """A client of its own, but for the DHT node: to start one takes a second of a processor.

    It guesses only if it is asked for a draft, because tests count steps, however slow a machine under load makes their
    passes.
    """
    dht = servers.dht

    async def join(_caller: ClientIdentity, _config: ClientConfig) -> SharedDht:
        return SharedDht(dht)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientIdentity, "join", join)
        patch.setattr(opening, "_LEAST_PASS_S", math.inf)
        remote = kind.from_pretrained(str(servers.model), swarm=servers.swarm, **options)
    with remote:
        yield ends_only_at_its_length(remote)


class SharedDht:
    """Lives on when one of its users leaves."""

    def __init__(self, dht: Dht) -> None:
        self._dht = dht

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dht, name)

    async def shutdown(self) -> None:
        pass


def random_ids(batch_size: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch_size, length), generator=torch.Generator().manual_seed(seed))
