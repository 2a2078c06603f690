"""The agreement of honest peers on the statements of one phase, even if some peers send late or to some only. Pure.

A statement counts if it comes before the deadline. Later it needs signatures of as many full members as periods of
``spread_s`` have passed. In one period a statement spreads from an honest peer to all others (Dolev and Strong, 1983).
If one honest peer accepts a statement, its own signature lets all others accept it in time. After as many periods as
peers may cheat, all honest peers have the same statements.

The phase ends earlier if all speak in time: full members vote on what they have heard, and n - f equal votes of n end
it, where f < n/3 peers cheat. Two different sets cannot both get so many votes, because honest peers vote once. Votes
are statements too, so if one honest peer closes a phase by votes, all do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swarm_training.broadcast.signed import SignedStatement

_MOST = 2  # statements of a peer kept in one place: two different ones prove that it equivocates


def most_cheaters(num_members: int) -> int:
    """Return the largest number below a third of the members."""
    return (num_members - 1) // 3


class Agreement:
    """The agreement on one phase. All times are read from one clock, in seconds.

    Attributes:
        expected: ids of the peers that must speak, sorted.
        statements: the accepted statements, by sender.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.expected: tuple[str, ...] = ()
        self.statements: dict[str, list[SignedStatement]] = {}
        self._votes: dict[str, list[SignedStatement]] = {}
        self._electorate: tuple[str, ...] = ()
        self._deadline_s: float | None = None  # None: this peer has not reached the phase yet
        self._spread_s = 0.0
        self.has_voted = False

    def open(self, expected: Iterable[str], electorate: Iterable[str], deadline_s: float, spread_s: float) -> None:
        """Open the phase, which this peer has reached. ``electorate``: ids of the full members."""
        self.expected, self._electorate = tuple(sorted(expected)), tuple(sorted(electorate))
        self._deadline_s, self._spread_s = deadline_s, spread_s

    @property
    def end_s(self) -> float:
        """Return the time after which no statement counts any more."""
        assert self._deadline_s is not None
        return self._deadline_s + most_cheaters(len(self._electorate)) * self._spread_s

    def needs_endorsement(self, now: float) -> bool:
        """Return whether a statement that is accepted now may reach other peers after the deadline."""
        return self._deadline_s is not None and now > self._deadline_s - self._spread_s

    def take(self, statement: SignedStatement, endorsers: Iterable[str], now: float) -> bool:
        """Accept a statement if it is new and counts. Return whether it does; then it must be passed on to all."""
        if statement.place.kind == self.kind:
            known = self.statements.setdefault(statement.sender, [])
        else:
            known = self._votes.setdefault(statement.sender, [])
        if len(known) >= _MOST or any(each.digest == statement.digest for each in known):
            return False
        if self._deadline_s is not None:
            late_s = now - self._deadline_s
            signatures = len(set(endorsers).intersection(self._electorate) - {statement.sender})
            if late_s > min(signatures, most_cheaters(len(self._electorate))) * self._spread_s:
                return False
        known.append(statement)
        return True

    def vote(self, now: float) -> tuple[bytes, ...] | None:
        """Return this peer's vote, once, if it has heard one statement of each expected peer in time; else None."""
        if self.has_voted or self._deadline_s is None or now > self._deadline_s:
            return None
        if any(len(self.statements.get(name, ())) != 1 for name in self.expected):
            return None
        self.has_voted = True
        return tuple(self.statements[name][0].digest for name in self.expected)

    def outcome(self, now: float) -> Mapping[str, SignedStatement] | None:
        """Return the statements that count, one of each sender; None while that is open. If a sender has two at the
        end, the one with the lower digest counts."""
        if self._deadline_s is None:
            return None
        if (certified := self._certified()) is not None:
            return certified
        if now <= self.end_s:
            return None
        heard = {name: self.statements[name] for name in self.expected if self.statements.get(name)}
        return {name: min(each, key=lambda statement: statement.digest) for name, each in heard.items()}

    def has_majority(self, heard: Collection[str]) -> bool:
        """Return whether most full members have spoken, if most were expected; otherwise this peer may be cut off."""
        expected = set(self.expected).intersection(self._electorate)
        return 2 * len(expected) <= len(self._electorate) or 2 * len(expected.intersection(heard)) > len(expected)

    def equivocations(self) -> dict[str, tuple[SignedStatement, SignedStatement]]:
        """Return, by sender, the two different statements of each peer that equivocates."""
        return {name: (each[0], each[1]) for name, each in self.statements.items() if len(each) == _MOST}

    def _certified(self) -> Mapping[str, SignedStatement] | None:
        counts: dict[tuple[bytes, ...], set[str]] = {}
        for voter in set(self._electorate).intersection(self._votes):
            for statement in self._votes[voter]:
                counts.setdefault(tuple(statement.said.vote.digests), set()).add(voter)
        needed = len(self._electorate) - most_cheaters(len(self._electorate))
        for digests, voters in counts.items():
            if len(voters) >= needed and len(digests) == len(self.expected):
                by_name = zip(self.expected, digests, strict=True)
                found = {name: self._find(name, digest) for name, digest in by_name}
                complete = {name: each for name, each in found.items() if each is not None}
                if len(complete) == len(found):
                    return complete
        return None

    def _find(self, name: str, digest: bytes) -> SignedStatement | None:
        return next((each for each in self.statements.get(name, ()) if each.digest == digest), None)
