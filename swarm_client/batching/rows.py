"""Many generations as one batch of the stock model, although each has its own session.

A forward has two halves. The first half ends at the blocks, whose input goes row by row into the sessions. The second
half begins after the blocks, with the hidden states that have come back. Rows may therefore come back at different
times, and a row's halves may run beside different rows. The code before and after the blocks is the family's own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

    @torch.no_grad()
    def inputs(
        self,
        token_ids: torch.Tensor,
        sessions: Sequence[RemoteSession],
        shifts: Sequence[int],
        pictures: Mapping[str, torch.Tensor] | None = None,
    ) -> list[BlockInput]:
        """Return the next input of each session.

        token_ids: [rows, new], one row for each session; shifts: see ``shift_after``, by session; pictures: see
        ``Request``. The model itself finds the positions of a first input with pictures.
        """
        before = _Before(sessions, shifts, with_pictures=pictures is not None)
        with contextlib.suppress(_TakenOver):
            self._forward(token_ids, before, pictures)
        return before.taken

    def logits(self, token_ids: torch.Tensor, hidden: torch.Tensor, sessions: Sequence[RemoteSession]) -> torch.Tensor:
        """Return the logits of the next tokens, [rows, vocabulary] float32.

        token_ids: [rows, 1], the last token of each row; hidden: [rows, 1, hidden_size], the output of the blocks for
        these tokens.
        """
        output = self._forward(token_ids, _Behind(sessions, hidden))
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def logits_of_all(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, session: RemoteSession, num_after: int = 0
    ) -> torch.Tensor:
        """Return the logits after each of some tokens of one session, [1, new, vocabulary] float32.

        token_ids: [1, new]; hidden: [1, new, hidden_size], the output of the blocks for these tokens; num_after: the
        number of positions that the session has after these tokens.
        """
        output = self._forward(token_ids, _Behind([session], hidden, num_after))
        logits: torch.Tensor = output.logits.float()
        return logits

    def _forward(
        self, token_ids: torch.Tensor, stand_in: _Rows, pictures: Mapping[str, torch.Tensor] | None = None
    ) -> Any:
        model, past = self._model, stand_in.next_positions
        new = token_ids.shape[1]
        options: dict[str, Any] = {}
        if pictures is not None:
            options |= pictures
        elif self._takes_positions:
            options["position_ids"] = torch.tensor(past)[:, None] + torch.arange(new)
        else:  # the model derives them from the mask
            columns = torch.arange(max(past) + new)
            options["attention_mask"] = (columns >= max(past) - torch.tensor(past)[:, None]).long()
        options = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in options.items()
        }
        options[model._family.cache_argument] = Cache(layers=[RemoteLayer(stand_in)])  # type: ignore[arg-type]
        return model(
            token_ids.to(model.device), use_cache=True, return_dict=True, logits_to_keep=stand_in.num_wanted, **options
        )


def shift_after(first: BlockInput) -> int:
    """Return how much greater the position after the input ``first`` is than the number of its tokens.

    The result is negative after pictures of models with positions on several axes: a picture's tokens share positions.
    """
    positions = first.position_ids
    return 0 if positions is None else int(positions.max()) + 1 - first.hidden.shape[1]


class _Rows:
    """A stand-in for the sessions of all rows in a cache, with what ``RemoteLayer`` and ``ModelPass`` need."""

    def __init__(self, sessions: Sequence[RemoteSession], lengths: Sequence[int], num_wanted: int = 1) -> None:
        """Keep the sessions; ``num_wanted`` is the number of last positions whose logits are wanted."""
        self._sessions = sessions
        self.next_positions = lengths
        self.num_wanted = num_wanted
        self.length = max(lengths)

    def runs_on(self, swarm: Swarm) -> bool:
        return all(session.runs_on(swarm) for session in self._sessions)


class _TakenOver(Exception):
    """A signal that the input of the blocks is known, so that the rest of the forward is skipped."""


class _Before(_Rows):
    """A stand-in that stops a forward before the blocks; ``taken`` then has the blocks' input by row."""

    def __init__(
        self, sessions: Sequence[RemoteSession], shifts: Sequence[int], *, with_pictures: bool = False
    ) -> None:
        super().__init__(sessions, [session.length for session in sessions])
        self.next_positions = [length + shift for length, shift in zip(self.next_positions, shifts, strict=True)]
        self.taken: list[BlockInput] = []
        self._keeps_positions = [with_pictures or shift != 0 for shift in shifts]

    def step(self, inputs: BlockInput, _num_wanted: int | None = None) -> torch.Tensor:
        rows = [inputs.rows(slice(number, number + 1)) for number in range(len(self._keeps_positions))]
        self.taken = [  # sessions count positions themselves
            replace(row, attention_mask=None, position_ids=row.position_ids if keeps else None)
            for row, keeps in zip(rows, self._keeps_positions, strict=True)
        ]
        raise _TakenOver


class _Behind(_Rows):
    """A stand-in that returns the outputs of the blocks, which servers have computed already."""

    def __init__(self, sessions: Sequence[RemoteSession], hidden: torch.Tensor, num_after: int = 0) -> None:
        new = hidden.shape[1]
        super().__init__(sessions, [session.length - num_after - new for session in sessions], new)
        self._hidden = hidden

    def step(self, _inputs: BlockInput, _num_wanted: int | None = None) -> torch.Tensor:
        return self._hidden
