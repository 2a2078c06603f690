"""The recent answers of one session's servers, kept until they may be checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.core.events import DoubtfulTokens, Reporter
from swarm_client.routing.routing import Route
from swarm_client.swarm.swarm import Swarm
from swarm_client.verification.checker import checker_of
from swarm_client.verification.checks import SampledAnswer
from swarm_client.verification.verdict import CheckVerdict
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.comparison import MIN_POSITIONS
from swarm_protocol.wire.block_input import BlockInput

FIRST_OUTPUTS = 8  # outputs that are requested at the first step, even if fewer are used
_MOST_OUTPUTS = 256  # positions that are kept
_MOST_ROUNDS = 8  # checks of one step; another follows only after a check that has found a lie
_SOON = 8  # the first check of a text comes at a random step among this many
_PROMPT_TOKENS = 33  # a step of so many positions begins a text; servers verify fewer guesses at once


class SessionChecks:
    """The checks of one session. All methods run on the background loop.

    The first answers of a server are held back until they are checked. Later answers are checked beside the session:
    every row at least once, as far as the budget allows, and a random share of the rest.
    """

    def __init__(self, swarm: Swarm, reporter: Reporter) -> None:
        self._swarm = swarm
        self._reporter = reporter
        self._checker = checker_of(swarm)
        self._hops: Route = ()
        self._is_first_chain = True
        self._is_rounded = False
        self._repairs = 0  # recoveries and moves so far
        self._outputs: list[torch.Tensor] = []  # each [batch, positions, hidden_size], the last ones of the session
        self._length = 0
        self._good_length = 0  # positions up to the last one whose output has passed a check
        self._blamed: frozenset[str] = frozenset()  # servers whose tokens have been reported as doubtful already
        self._owed: list[int] = []  # rows that were not checked since their text began
        self._steps_left = 0  # steps until owed rows may be checked
        self._has_begun = False

    @property
    def are_made(self) -> bool:
        return self._checker.share > 0

    def num_asked(self, num_wanted: int, num_tokens: int) -> int:
        """Return how many outputs to request, so that there are enough to compare."""
        if self.are_made and not self._outputs:
            return max(num_wanted, min(num_tokens, FIRST_OUTPUTS))
        return num_wanted

    def distrusts(self, hops: Route) -> bool:
        """Return whether the session must leave its servers, because one of them was found to answer wrongly."""
        found = frozenset(hop.server.peer_id for hop in hops if self._swarm.is_banned(hop.server.peer_id))
        if found:
            self._call_doubtful(found)
        return bool(found)

    def begin_again(self) -> None:
        """Start again with new servers, which receive all positions from the client."""
        self._hops, self._is_first_chain, self._is_rounded, self._outputs = (), True, False, []

    async def accept(
        self,
        hops: Route,
        codecs: Sequence[pb.Codec],
        rows: Callable[[int], BlockInput],
        outputs: torch.Tensor,
        num_tokens: int,
        length: int,
        adapter: AdapterSnapshot,
        reordered: Sequence[int] | None,
    ) -> bool:
        """Return whether a step's outputs may be used; if not, the session must leave its servers.

        Args:
            codecs: the codecs of the links to, between and from these servers.
            rows: a function from a row's number to all of the row's inputs, [1, length, hidden_size], with the step's.
            outputs: [batch, asked, hidden_size], the outputs of the step's last positions.
            num_tokens: the positions that the step adds to every row; ``length``: all positions of the session now.
            reordered: the old row of each row, if rows were reordered before the step; None if not.
        """
        self._checker.start()
        self._keep(hops, outputs, num_tokens, length, reordered)
        self._is_rounded |= not {pb.RAW}.issuperset(codecs)
        batch_size = len(outputs)
        self._owe(batch_size, num_tokens, reordered)
        if sum(kept.shape[1] for kept in self._outputs) < MIN_POSITIONS:  # fewer positions say too little
            return True
        owed = [row for row in self._owed if row < batch_size]
        is_owed = bool(owed) and self._steps_left <= 0
        is_drawn = self._checker.draws(self, hops, batch_size, num_tokens, length, is_owed=is_owed)
        for _ in range(_MOST_ROUNDS):
            is_new = self._checker.has_new(hops)
            if not is_new and not is_drawn:
                return True
            is_drawn = False
            row = self._checker.choose(owed or range(batch_size))
            self._owed = owed = [each for each in owed if each != row]
            kept = self._kept(row)
            sample = SampledAnswer(hops, codecs, rows(row), kept, adapter, self._is_first_chain, self._is_rounded)
            wait_s = self._swarm.config.timeouts.check_s if is_new else 0.0  # only first answers are held back
            verdict = await self._checker.check(
                sample, self._reporter, wait_s=wait_s, then=partial(self._learn, length=length, row=row)
            )
            is_accepted = self._take(verdict, row, hops, length, length - num_tokens)
            if is_accepted is not None:
                return is_accepted
        return True

    def _take(self, verdict: CheckVerdict | None, row: int, hops: Route, length: int, num_before: int) -> bool | None:
        """Take a row's verdict, if there is one. Return whether the outputs may be used; None: check once more."""
        if verdict is None:
            return True
        self._owe_again(verdict, row)
        if not verdict.distrusted.isdisjoint(hop.server.peer_id for hop in hops):
            if self._good_length < num_before:  # earlier outputs were returned to the user already
                self._call_doubtful(verdict.distrusted, num_before)
            return False
        if verdict.lies:  # a checking server has lied, so that this check says nothing about the chain
            return None
        if verdict.passed:
            self._good_length = length
        return True

    def _kept(self, row: int) -> torch.Tensor:
        """Return the row's kept outputs, [positions, hidden_size]."""
        return torch.cat([tensor[row] for tensor in self._outputs])

    def _owe(self, num_rows: int, num_tokens: int, reordered: Sequence[int] | None) -> None:
        """Update the rows to check: all rows when a text begins, otherwise the rows that are still unchecked."""
        if num_tokens >= _PROMPT_TOKENS or not self._has_begun:
            self._has_begun, self._owed = True, list(range(num_rows))
            self._steps_left = self._checker.choose(range(_SOON))
            return
        self._steps_left -= 1
        if reordered is not None:
            self._owed = [row for row, origin in enumerate(reordered) if origin in self._owed]

    def _owe_again(self, verdict: CheckVerdict, row: int) -> None:
        if not verdict.has_found:
            self._owed.append(row)

    def _learn(self, verdict: CheckVerdict, length: int, row: int) -> None:
        self._owe_again(verdict, row)
        found = frozenset(hop.server.peer_id for hop in self._hops) & verdict.distrusted
        if found:
            self._call_doubtful(found)
        elif verdict.passed and not verdict.distrusted:
            self._good_length = max(self._good_length, length)

    def _call_doubtful(self, servers: frozenset[str], end: int | None = None) -> None:
        end = self._length if end is None else end
        if servers <= self._blamed or end <= self._good_length:
            return
        self._blamed |= servers
        self._reporter.report(DoubtfulTokens(tuple(sorted(servers)), self._good_length, end))

    def _keep(
        self, hops: Route, outputs: torch.Tensor, num_tokens: int, length: int, reordered: Sequence[int] | None
    ) -> None:
        before = self._hops
        repairs, self._repairs = self._repairs, self._reporter.num_repairs
        self._good_length = min(self._good_length, length - num_tokens)
        num_cropped = self._length - (length - num_tokens)  # positions that were removed since the last step
        self._hops, self._length = hops, length
        same = [hop.server.peer_id for hop in hops] == [hop.server.peer_id for hop in before]
        if before and (not same or repairs != self._repairs):
            self._is_first_chain, self._outputs = False, []
            return  # unknown: which of the servers computed which outputs
        if num_cropped < 0 or outputs.shape[1] < num_tokens:  # positions without outputs lie between
            self._outputs.clear()
        elif num_cropped or reordered is not None:
            self._outputs = _changed(self._outputs, num_cropped, reordered)
        self._outputs.append(outputs)
        while sum(kept.shape[1] for kept in self._outputs[1:]) >= _MOST_OUTPUTS:  # enough without the oldest
            del self._outputs[0]


def _changed(outputs: Sequence[torch.Tensor], num_cropped: int, reordered: Sequence[int] | None) -> list[torch.Tensor]:
    """Return the outputs without the cropped positions, for the current rows."""
    if not outputs:
        return []
    joined = torch.cat(list(outputs), 1)
    joined = joined[:, : max(0, joined.shape[1] - num_cropped)]
    joined = joined if reordered is None else joined[list(reordered)]
    return [joined] if joined.shape[1] else []
