"""One generation of the loop: the tokens so far, and the next input of its session."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable

import torch

from swarm_client.batching.request import FinishReason, Request, Servers, Token, TokenListener
from swarm_client.batching.rows import shift_after
from swarm_client.batching.sampler import Choice
from swarm_client.sessions.session import RemoteSession
from swarm_client.speculation.choosing import Verified
from swarm_client.speculation.draft import Guesses
from swarm_client.speculation.generating import Ends
from swarm_client.speculation.past import Past
from swarm_client.speculation.speculation import Guessing
from swarm_protocol.wire.block_input import BlockInput


class BatchRow:
    """One active generation.

    Attributes:
        num_new: the number of new tokens so far; ``last`` is the id of the newest token.
        cancel: a function that ends the generation, and frees its room on servers at once. Any thread may call it, also
            after the end.
        is_own: whether the row owns its session, and closes the session at the end.
        stepping: the step of its session that servers compute.
        group: the rows whose steps were sent together with this row's step.
        past: the past that the session keeps for wrong guesses; ``past.settle`` must be called after each step.
        scored: the scored tokens of the prompt so far; None if the listener does not want them, or has them.
        stopped: an event that is set after the end, once no step of the session is under way any more.
        first: the session's first input, if the prompt has pictures.
        shift: how much greater the next position is than the session's length.
        context: a copy of the caller's context, in which the steps are computed, so that they belong to its trace.
    """

    def __init__(
        self,
        cancel: Callable[[], None],
        choice: Choice,
        session: RemoteSession,
        listener: TokenListener,
        ends: Ends,
        guessing: Guessing | None,
        request: Request | None = None,
        first: BlockInput | None = None,
    ) -> None:
        """Set up a row. ``request`` is None if the generation has begun outside the loop.

        Such a generation's session has all tokens of the choice but the last.
        """
        self.first, self.shift = first, 0 if first is None else shift_after(first)
        scores_prompt = request is not None and request.scores_prompt
        # The servers that the listener was informed of; None: it does not want to know them.
        self._servers = Servers(()) if request is not None and request.with_servers else None
        self.choice = choice
        self.session = session
        self.listener = listener
        self.num_new = 0
        self.last = choice.token_ids[-1]
        self.is_own = request is not None
        self.stepping: asyncio.Task[torch.Tensor] | None = None
        self.group: frozenset[BatchRow] = frozenset()
        self.stopped = threading.Event()
        self.context = contextvars.copy_context()
        self.scored: list[Token] | None = [Token(choice.token_ids[0])] if scores_prompt else None
        self._ends = ends
        self.cancel = cancel
        self.guesses = Guesses.none()  # that the active step verifies
        self._guessing = guessing
        self.past = Past(session)
        self._is_timed, self._has_begun = False, request is None
        self._sent = self.last  # the first token of the active step

    def report_servers(self) -> None:
        """Inform the listener of the servers, if it wants to know them and they have changed."""
        if self._servers is not None and self._servers.hops != self.session.hops:
            self._servers = Servers(self.session.hops)
            self.listener(self._servers)

    @property
    def is_decoding(self) -> bool:
        """Return whether servers have computed all tokens but the last."""
        return self.num_new > 0 or not self.is_own

    @property
    def next_ids(self) -> torch.Tensor:
        """Return the token ids [1, new] that the session gets next, or got last."""
        if not self.is_decoding:
            return torch.tensor([self.choice.token_ids])
        last = torch.tensor([[self._sent]])
        return torch.cat([last, self.guesses.token_ids], 1) if self.guesses.length else last

    @property
    def num_wanted(self) -> int:
        """Return how many of the last positions in the session's next input need outputs."""
        return 1 + self.guesses.length if self.scored is None else len(self.choice.token_ids)

    @property
    def is_full(self) -> bool:
        return self.num_new >= self._ends.most_tokens

    def guess(self, *, is_alone: bool) -> None:
        """Make guesses for the next step, unless the row is batched with other generations."""
        self._sent, self.guesses = self.last, Guesses.none()
        if self._guessing is None:
            return
        self._is_timed = is_alone
        if is_alone:
            most = self._ends.most_tokens - self.num_new - 1
            self.guesses = self._guessing.next(most, most_rows=1)
        if self.guesses.length:
            self.past.keep()

    def confirm(self, token_ids: list[int], hidden: torch.Tensor | None) -> None:
        """Confirm the tokens of the last step; ``hidden`` is [tokens, hidden_size] if the draft wants it."""
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
        """Append the next token; return why it was the last, or None."""
        self.last = token.id
        self.num_new += 1
        self.choice.token_ids.append(token.id)
        if token.id in self._ends.stop_ids:
            return "stop"
        return "length" if self.is_full else None

    def end_scoring(self) -> None:
        """Note that the listener has all scored tokens of the prompt."""
        self.scored = None

    def join(self, group: frozenset[BatchRow]) -> None:
        """Note the rows whose steps are sent together with this row's step."""
        self.group = group

    def begin_step(self, stepping: asyncio.Task[torch.Tensor]) -> None:
        """Note the step that servers compute from now on."""
        self.stepping, self.first = stepping, None

    def end(self) -> None:
        """End the row, and break its reference cycles, which would keep the session until garbage is collected."""
        self.group, self.cancel = frozenset(), lambda: None
        if self._guessing is not None:
            self._guessing.end()
