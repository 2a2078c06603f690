"""The methods of stock ``generate`` that change with guesses."""

from __future__ import annotations

from typing import Any

import torch

from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.generating import may_speculate, speculative_sample
from swarm_client.speculation.speculation import Speculation


class SpeculationMixin:
    """The methods of a model that ``generate`` calls.

    Attributes:
        speculation: the model's draft and its statistics; it may be replaced between generations.
    """

    speculation: Speculation
    prompts: Any
    _family: Any
    _shared_loop: Any

    @property
    def is_watched(self) -> bool:
        """Return whether foreign hooks may read hidden states; see ``RemoteModelMixin``."""
        raise NotImplementedError

    def _session_of(self, cache: Any) -> RemoteSession:
        """Return the session that a cache stands for."""
        raise NotImplementedError

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Choose the tokens for ``generate`` one by one; one pass gives several where guesses are right."""
        cache = model_kwargs.get(self._family.cache_argument)
        if (
            self.speculation.draft is not None
            and cache is not None
            and self.prompts is None
            and not self.is_watched
            and may_speculate(input_ids, generation_config, synced_gpus, model_kwargs)
        ):
            output = speculative_sample(
                self,
                self.speculation,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                self._session_of(cache),
                self._shared_loop,
                model_kwargs,
            )
            if output is not None:
                return output
        return super()._sample(  # type: ignore[misc]  # of GenerationMixin
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
        )

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the candidate generator for an ``assistant_model``. The assistant guesses even where it is unsure, if
        no threshold was set, because one more pass through servers costs more than wrong guesses."""
        generator = super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]  # of GenerationMixin
        assistant = getattr(generator, "assistant_model", None)
        if assistant is not None and assistant.generation_config.assistant_confidence_threshold is None:
            generator.assistant_confidence_threshold = 0.0
            for config in (generator.generation_config, generator.assistant_generation_config):
                config.assistant_confidence_threshold = 0.0
        return generator
