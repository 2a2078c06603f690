"""Stock models whose ``generate`` is speculative, in this process: a cache of transformers stands for the session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from swarm_client.speculation.generating import speculative_sample
from swarm_client.speculation.speculation import Speculation
from swarm_models.checkpoints.family import cache_argument_of


class LocalSession:
    """What ``SpeculativeGeneration`` needs of a ``RemoteSession``."""

    num_sharing = 1
    records_past = False

    def __init__(self, cache: DynamicCache) -> None:
        self._cache = cache

    @property
    def length(self) -> int:
        return self._cache.get_seq_length()

    @property
    def batch_size(self) -> int | None:
        layers = self._cache.layers
        return layers[0].keys.shape[0] if layers and layers[0].is_initialized else None

    def reorder(self, indices: torch.Tensor) -> None:
        self._cache.batch_select_indices(indices)

    def crop(self, num_removed: int) -> None:
        if num_removed:
            self._cache.crop(-num_removed)

    def record_past(self) -> None:
        self.records_past = True

    @contextmanager
    def with_optional_rows(self) -> Iterator[None]:
        yield


class _Alone:
    def is_alone(self) -> bool:
        return True

    def computes_for(self, _model: Any, _config: Any) -> bool:
        return False


class _Local:
    """The part of ``RemoteModelMixin`` that guesses, without its refusals.

    With a draft, ``_sample`` is the client's loop over tokens. Without one, it is the loop of transformers, which says
    what the text has to be.
    """

    speculation = Speculation(None)
    _family = SimpleNamespace(cache_argument=cache_argument_of(LlamaForCausalLM.forward))
    _shared_loop = _Alone()

    def _sample(
        self,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **options: Any,
    ) -> Any:
        arguments = input_ids, logits_processor, stopping_criteria, generation_config
        output = speculative_sample(self, *arguments, synced_gpus, streamer, options)
        return super()._sample(*arguments, synced_gpus, streamer, **options) if output is None else output

    def _session_in(self, cache: DynamicCache) -> LocalSession:
        return LocalSession(cache)


def local(kind: type[PreTrainedModel], config: Any) -> Any:
    """A model of random weights, with the attribute ``speculation``."""
    torch.manual_seed(0)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Local, kind), named)(config).eval()
