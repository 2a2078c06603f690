"""The guesses for one model, and their number in each generation."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from swarm_client.speculation.choosing import Verified
from swarm_client.speculation.draft import Draft, DraftSession, Guesses, Ranking
from swarm_client.speculation.policy import MOST_POSITIONS, DraftPlan, PassCosts, Policy
from swarm_protocol.failures import outcome_of

_logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class SpeculationStats:
    """The statistics of one generation, or of all generations of a model.

    Attributes:
        passes: the passes through the servers after the prompt, and the ``tokens`` that these gave.
        guesses: the guesses in the rows that were verified, and how many of them were ``right``.
    """

    passes: int = 0
    tokens: int = 0
    guesses: int = 0
    right: int = 0

    def add(self, num_tokens: int, guesses: Guesses, num_right: int) -> None:
        self.passes += 1
        self.tokens += num_tokens
        self.guesses += guesses.num_rows * guesses.length
        self.right += num_right


class Speculation:
    """A model's draft, with what its generations have measured.

    Attributes:
        draft: the draft that guesses; ``off`` says why it does not guess, and is empty if it does.
    """

    def __init__(self, draft: Draft | None, *, least_pass_s: float = 0.0, off: str = "") -> None:
        """Set the draft. It guesses only where a pass without guesses takes at least ``least_pass_s`` seconds."""
        self.draft, self.off = draft, off
        self.stats = SpeculationStats()
        self._least_pass_s = least_pass_s
        self._acceptance: float | None = None  # of the last generation
        self._costs: PassCosts | None = None  # of the last generation
        self._lock = threading.Lock()

    def begin(self, prompt: list[int], ranking: Ranking) -> Guessing | None:
        """Begin the guesses of one generation; return None if there are none."""
        if self.draft is None or self.off:
            return None
        with self._lock:
            prior = self.draft.acceptance if self._acceptance is None else self._acceptance
            costs = copy.deepcopy(self._costs)  # generations of several threads each continue a copy
        policy = Policy(prior, self.draft.most_rows, self._least_pass_s, costs)
        return Guessing(self, self.draft, prompt, ranking, policy)

    def learn(self, policy: Policy) -> None:
        """Keep the measurements of a generation that has ended, for the next generation."""
        with self._lock:
            self._acceptance, self._costs = policy.acceptance.of(1), copy.deepcopy(policy.costs)


class Guessing:
    """The guesses for one generation. One thread at a time may use an instance."""

    def __init__(self, owner: Speculation, draft: Draft, prompt: list[int], ranking: Ranking, policy: Policy) -> None:
        self.num_hidden = draft.num_hidden
        self.stats = SpeculationStats()
        self._owner, self._ranking, self._policy = owner, ranking, policy
        self._session: DraftSession | None = draft.begin()  # None: the draft has failed
        self._prompt: list[int] | None = prompt
        self._sent_s = 0.0
        self._guess_s: float | None = None  # the time of the last guesses alone; None if the draft also read much
        self._num_unread = 0  # tokens that were confirmed since the draft guessed
        self._guesses = Guesses.none()

    def next(self, most_guesses: int, *, most_rows: int, is_alone: bool = True) -> Guesses:
        """Return the guesses for the next pass, which begins now.

        Args:
            is_alone: whether servers have nothing else to do, as far as is known.
        """
        start_s = time.perf_counter()
        plan = self._policy.choose(most_guesses, most_rows)
        self._guesses = Guesses.none()
        reads_much = self._num_unread > MOST_POSITIONS  # drafts may read what was confirmed when they guess
        if is_alone and plan.length:
            self._guesses = self._by_draft(lambda draft: draft.guess(plan, self._ranking)) or Guesses.none()
            self._num_unread = 0
        self._sent_s = time.perf_counter()
        self._guess_s = None if reads_much else self._sent_s - start_s
        return self._guesses

    def only_first_row(self) -> Guesses:
        """Return only the likeliest line of the last guesses, as there is no room for more; its pass begins now."""
        self._guesses = Guesses(self._guesses.token_ids[:1])
        self._sent_s = time.perf_counter()
        return self._guesses

    def verified(self, verified: Verified, hidden: torch.Tensor | None) -> None:
        """Take the result for the last guesses. Their pass ends now.

        hidden: [tokens, hidden_size], from which each token was predicted; None if the draft does not want it.
        """
        guesses = self._guesses
        seconds = time.perf_counter() - self._sent_s
        self._policy.passed(DraftPlan(guesses.num_rows, guesses.length), seconds, verified.num_right, self._guess_s)
        for stats in (self.stats, self._owner.stats):
            stats.add(len(verified.token_ids), guesses, verified.num_right)
        self.written(verified.token_ids, hidden)

    def begin(self, first_token: int, hidden: torch.Tensor | None) -> None:
        """Confirm the prompt, which has been computed, and the first token.

        hidden: [positions, hidden_size], of the last positions of the prompt.
        """
        assert self._prompt is not None
        token_ids = [*self._prompt, first_token]
        self._prompt, before = None, None
        if hidden is not None:
            before = hidden.new_zeros(len(token_ids), hidden.shape[1])
            before[-len(hidden) :] = hidden
        self.written(token_ids, before)

    def written(self, token_ids: list[int], hidden: torch.Tensor | None) -> None:
        """Take tokens that the model has chosen. The time of their pass is not measured."""
        self._num_unread += len(token_ids)
        self._by_draft(lambda draft: draft.confirm(token_ids, hidden))

    def _by_draft(self, work: Callable[[DraftSession], T]) -> T | None:
        """Return what the draft's session does; None without one. If it fails, the text continues without guesses."""
        if self._session is None:
            return None
        done = outcome_of(partial(work, self._session))
        if not isinstance(done, Exception):
            return done
        self._session = None
        _logger.warning("the draft has failed, and this text goes on without guesses: %s", done, exc_info=done)
        return None

    def end(self) -> None:
        if self.stats.guesses:
            self._owner.learn(self._policy)
