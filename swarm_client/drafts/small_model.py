"""A small model of transformers as a draft. It has the same tokens as the model whose text it guesses."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from swarm_client.speculation.draft import Draft, Guesses, Ranking, SteppedSession
from swarm_client.speculation.policy import DraftPlan
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import locate
from swarm_models.checkpoints.family import cache_argument_of, max_positions
from swarm_models.checkpoints.hollow_model import load_whole_model


class SmallModelDraft(Draft):
    """A draft that is a causal language model on this machine."""

    acceptance = 0.6

    def __init__(self, model: Any, name: str, vocab_size: int) -> None:
        """Keep the draft's model.

        Args:
            model: a stock causal language model, which is not changed.
        """
        self.name, self.model, self.vocab_size = name, model, vocab_size
        self.max_positions = max_positions(model.config)
        self.cache_argument = cache_argument_of(model.forward) or "past_key_values"

    @classmethod
    def load(cls, name_or_path: str, vocab_size: int) -> SmallModelDraft:
        """Load a model. Raise CheckpointError or UnsupportedModel if it cannot be read."""
        return cls(load_whole_model(ModelCheckpoint.open(locate(name_or_path))), name_or_path, vocab_size)

    def begin(self) -> SmallModelSession:
        return SmallModelSession(self)


class SmallModelSession(SteppedSession):
    """The keys and values of one generation's confirmed tokens. Guesses are removed again, or made in a copy."""

    def __init__(self, draft: SmallModelDraft) -> None:
        self._draft = draft
        self._cache = DynamicCache(config=draft.model.config)
        self._waiting: list[int] = []  # confirmed, but not in the cache
        self._length = 0  # confirmed, and in the cache
        self._line: DynamicCache | None = None  # the cache that also has the guesses
        self._num_rows = 1
        self._num_guessed = 0  # guessed positions in ``_cache`` itself

    def confirm(self, token_ids: Sequence[int], hidden: torch.Tensor | None) -> None:
        self._waiting.extend(token_ids)

    def guess(self, plan: DraftPlan, ranking: Ranking) -> Guesses:
        """Return guesses, at most as many as the draft has positions for."""
        if self._draft.max_positions is not None:
            left = self._draft.max_positions - self._length - len(self._waiting)
            plan = replace(plan, length=min(plan.length, left))
        return super().guess(plan, ranking)

    def start(self, num_rows: int) -> torch.Tensor | None:
        if self._num_guessed:
            self._cache.crop(-self._num_guessed)
        self._line, self._num_rows, self._num_guessed = None, num_rows, 0
        assert self._waiting, "a guess needs what was confirmed since the one before"
        logits = self._forward(torch.tensor([self._waiting]), self._cache)[0]
        self._length, self._waiting = self._length + len(self._waiting), []
        return logits

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._line is None:
            # Layers with windows or states cannot give back guesses, and the text goes on with one row.
            is_simple = self._num_rows == 1 and all(type(layer) is DynamicLayer for layer in self._cache.layers)
            self._line = self._cache if is_simple else copy.deepcopy(self._cache)
            if self._num_rows > 1:
                self._line.batch_repeat_interleave(self._num_rows)
        self._num_guessed += self._line is self._cache  # a copy is just dropped
        return self._forward(token_ids[:, None], self._line)

    def _forward(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the logits after the last token, [rows, ``vocab_size``]; ``token_ids`` are [rows, new]."""
        model, size = self._draft.model, self._draft.vocab_size
        with torch.inference_mode():
            options = {self._draft.cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
            output = model(token_ids.to(model.device), **options)
            logits = output.logits[:, -1, :size].float().cpu()
        missing = size - logits.shape[1]  # rows of the model's embedding that are no tokens
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
