"""Many generations as one batch of the stock model, though each has a session of its own.

A forward is made in two halves. The first goes as far as the blocks, whose input is taken row by row into the
sessions; the second begins behind them, with what has come back. So rows may come back at different times, and the two
halves of a row may be made beside different others. Before and behind the blocks, it is the family's own code.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from swarm_client.model.cache import RemoteLayer
from swarm_client.sessions.session import RemoteSession
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.wire.block_input import BlockInput

if TYPE_CHECKING:
    from swarm_client.model.hf_model import RemoteModelMixin


class BatchedModel:
    """The two halves of a stock model's forward, over rows of different lengths without padding on servers."""

    def __init__(self, model: RemoteModelMixin) -> None:
        self._model: Any = model
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def inputs(self, token_ids: torch.Tensor, sessions: Sequence[RemoteSession]) -> list[BlockInput]:
        """What each session gets next.

        token_ids: [rows, new], of as many rows as there are sessions.
        """
        before = _Before(sessions)
        with contextlib.suppress(_TakenOver):
            self._forward(token_ids, before)
        return before.taken

    def logits(self, token_ids: torch.Tensor, hidden: torch.Tensor, sessions: Sequence[RemoteSession]) -> torch.Tensor:
        """Of the next tokens: [rows, vocabulary] float32.

        token_ids: [rows, 1], the last of each row; hidden: [rows, 1, hidden_size], what has come out of the blocks for
        them.
        """
        output = self._forward(token_ids, _Behind(sessions, hidden))
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def logits_of_all(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, session: RemoteSession, num_after: int = 0
    ) -> torch.Tensor:
        """Of the token after each of some of one session's: [1, new, vocabulary] float32.

        token_ids: [1, new]; hidden: [1, new, hidden_size], what has come out of the blocks for them; num_after: number
        of positions that the session has after these.
        """
        output = self._forward(token_ids, _Behind([session], hidden, num_after))
        logits: torch.Tensor = output.logits.float()
        return logits

    def _forward(self, token_ids: torch.Tensor, stand_in: _Rows) -> Any:
        model, past = self._model, stand_in.lengths
        new = token_ids.shape[1]
        options: dict[str, Any] = {}
        if self._takes_positions:
            options["position_ids"] = torch.tensor(past)[:, None] + torch.arange(new)
        else:  # they follow from the mask
            columns = torch.arange(max(past) + new)
            options["attention_mask"] = (columns >= max(past) - torch.tensor(past)[:, None]).long()
        options = {name: value.to(model.device) for name, value in options.items()}
        options[model._family.cache_argument] = Cache(layers=[RemoteLayer(stand_in)])  # type: ignore[arg-type]
        return model(
            token_ids.to(model.device), use_cache=True, return_dict=True, logits_to_keep=stand_in.num_wanted, **options
        )


class _Rows:
    """Stands in a cache for the sessions of all rows: what ``RemoteLayer`` and ``ModelPass`` need of a session."""

    def __init__(self, sessions: Sequence[RemoteSession], lengths: Sequence[int], num_wanted: int = 1) -> None:
        """``num_wanted``: of how many of the last positions logits are wanted."""
        self._sessions = sessions
        self.lengths = lengths
        self.num_wanted = num_wanted
        self.length = max(lengths)

    def runs_on(self, swarm: Swarm) -> bool:
        return all(session.runs_on(swarm) for session in self._sessions)


class _TakenOver(Exception):
    """The input of the blocks is known: the rest of this forward is not needed."""


class _Before(_Rows):
    """Attributes:
    taken: by row, what goes into the blocks.
    """

    def __init__(self, sessions: Sequence[RemoteSession]) -> None:
        super().__init__(sessions, [session.length for session in sessions])
        self.taken: list[BlockInput] = []

    def step(self, inputs: BlockInput, _num_wanted: int | None = None) -> torch.Tensor:
        self.taken = [BlockInput(hidden) for hidden in inputs.hidden.split(1)]  # positions count on in each session
        raise _TakenOver


class _Behind(_Rows):
    def __init__(self, sessions: Sequence[RemoteSession], hidden: torch.Tensor, num_after: int = 0) -> None:
        new = hidden.shape[1]
        super().__init__(sessions, [session.length - num_after - new for session in sessions], new)
        self._hidden = hidden

    def step(self, _inputs: BlockInput, _num_wanted: int | None = None) -> torch.Tensor:
        return self._hidden
