"""One generation of the loop: what it has written, and what its session gets next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import torch

from swarm_client.batching.request import FinishReason, Listener, Servers, Token
from swarm_client.batching.sampler import Choice
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.choosing import Verified
from swarm_client.speculation.draft import Guesses
from swarm_client.speculation.past import Past
from swarm_client.speculation.speculation import Guessing


class Row:
    """One generation that is under way.

    Attributes:
        num_new: tokens so far; ``last``: the newest one's id.
        is_own: its session is closed when it ends.
        stepping: the step of its session that servers compute.
        group: the rows whose steps were sent together with it.
        past: of its session, to be told when the step is over.
        scored: the tokens of its prompt so far, if they are to be told; None: they are not, or have been.
        stopped: set some time after it has ended, when nobody steps its session any more.
    """

    def __init__(
        self,
        cancel: Callable[[], None],
        choice: Choice,
        session: RemoteSession,
        listener: Listener,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        guessing: Guessing | None,
        *,
        with_servers: bool = False,
        scores_prompt: bool = False,
        has_begun: bool = False,
    ) -> None:
        """``has_begun``: elsewhere; the session has all tokens of the choice but the last."""
        self._servers = Servers(()) if with_servers else None  # that the listener knows
        self.choice = choice
        self.session = session
        self.listener = listener
        self.num_new = 0
        self.last = choice.token_ids[-1]
        self.is_own = not has_begun
        self.stepping: asyncio.Task[None] | None = None
        self.group: frozenset[Row] = frozenset()
        self.stopped = threading.Event()
        self.scored: list[Token] | None = [Token(choice.token_ids[0])] if scores_prompt else None
        self._stop_ids = stop_ids
        self._max_new_tokens = max_new_tokens
        self.cancel = cancel
        self.guesses = Guesses.none()  # that the step under way verifies
        self._guessing = guessing
        self.past = Past(session)
        self._is_timed, self._has_begun = False, has_begun
        self._sent = self.last  # the token that the step under way begins with

    def tell_servers(self) -> None:
        """If the listener wants to know, and knows others."""
        if self._servers is not None and self._servers.hops != self.session.hops:
            self._servers = Servers(self.session.hops)
            self.listener.happened(self._servers)

    @property
    def is_decoding(self) -> bool:
        """Whether servers have computed all tokens but the last."""
        return self.num_new > 0 or not self.is_own

    @property
    def next_ids(self) -> torch.Tensor:
        """[1, new]: what its session gets next, or has got last."""
        if not self.is_decoding:
            return torch.tensor([self.choice.token_ids])
        last = torch.tensor([[self._sent]])
        return torch.cat([last, self.guesses.token_ids], 1) if self.guesses.length else last

    @property
    def num_wanted(self) -> int:
        """Return of how many of the last positions that its session gets next outputs are needed."""
        return 1 + self.guesses.length if self.scored is None else len(self.choice.token_ids)

    @property
    def is_full(self) -> bool:
        return self.num_new >= self._max_new_tokens

    def guess(self, *, is_alone: bool) -> None:
        """What the next step is to verify: nothing if there are other generations, with which it is batched."""
        self._sent, self.guesses = self.last, Guesses.none()
        if self._guessing is None:
            return
        self._is_timed = is_alone
        if is_alone:
            most = self._max_new_tokens - self.num_new - 1
            self.guesses = self._guessing.next(most, most_rows=1)
        if self.guesses.length:
            self.past.keep()

    def confirm(self, token_ids: list[int], hidden: torch.Tensor | None) -> None:
        """These were written by the last step; hidden: [tokens, hidden_size] if the draft wants it."""
        if self._guessing is None:
            return
        if not self._has_begun:
            self._guessing.begin(token_ids[0], hidden)
            self._has_begun = True
        elif self._is_timed:
            self._guessing.verified(Verified(token_ids, 0), hidden)
        else:
            self._guessing.written(token_ids, hidden)

    def take(self, token: Token) -> FinishReason | None:
        """The token is the next one; returns why it was the last."""
        self.last = token.id
        self.num_new += 1
        self.choice.token_ids.append(token.id)
        if token.id in self._stop_ids:
            return "stop"
        return "length" if self.is_full else None

    def end(self) -> None:
        """Nothing more is written. What would keep its session for longer is let go."""
        self.group, self.cancel = frozenset(), _do_nothing
        if self._guessing is not None:
            self._guessing.end()


def _do_nothing() -> None:
    pass
