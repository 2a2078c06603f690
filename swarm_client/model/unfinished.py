"""Batches of texts in ``generate``: a row whose text has ended leaves the session, so that servers skip it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList

from swarm_client.model.cache import RemoteCache
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.wire.block_input import BlockInput


class UnfinishedRows:
    """A stand-in for a session in a cache. Its batch keeps all rows, of which the session keeps the unfinished ones."""

    def __init__(self, session: RemoteSession, num_rows: int) -> None:
        self._session = session
        self._rows = list(range(num_rows))

    @property
    def length(self) -> int:
        return self._session.length

    def runs_on(self, swarm: Swarm) -> bool:
        return self._session.runs_on(swarm)

    def step(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """Run ``RemoteSession.step`` for the unfinished rows. The outputs of finished rows are zeros."""
        if len(self._rows) == len(inputs.hidden):
            return self._session.step(inputs, num_wanted)
        outputs = self._session.step(inputs.rows(self._rows), num_wanted)
        everything = outputs.new_zeros(len(inputs.hidden), *outputs.shape[1:])
        everything[self._rows] = outputs
        return everything

    def finish(self, are_finished: torch.Tensor) -> None:
        """Remove these rows from the session, unless none would be left. ``are_finished``: bool [rows]."""
        kept = [place for place, row in enumerate(self._rows) if not are_finished[row]]
        if 0 < len(kept) < len(self._rows):
            self._session.reorder(torch.tensor(kept))
            self._rows = [self._rows[place] for place in kept]


class _FinishingCriteria(StoppingCriteriaList):
    """The stopping criteria of a generation. Rows that meet them leave the session."""

    def __init__(self, criteria: StoppingCriteriaList, rows: UnfinishedRows) -> None:
        super().__init__(criteria)
        self._unfinished_rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        are_finished: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._unfinished_rows.finish(are_finished)
        return are_finished


def leaving_rows(criteria: StoppingCriteriaList, cache: Any, config: GenerationConfig, num_rows: int) -> Any:
    """Return stopping criteria by which rows also leave the session of ``cache``; ``criteria`` if rows must stay."""
    # Without a token that ends texts, stock code goes on choosing tokens for finished rows.
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    is_own = isinstance(cache, RemoteCache) and not getattr(cache, "_is_user_defined", True)
    if num_rows == 1 or not ends or not is_own or config.return_dict_in_generate:
        return criteria
    rows = UnfinishedRows(cache.session, num_rows)
    cache.layers[0].session = rows
    return _FinishingCriteria(criteria, rows)
