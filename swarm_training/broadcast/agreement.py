"""What honest peers agree on to have heard in one phase, although some send too late, or to some only. Pure.

A statement counts if it comes before the deadline, or later with signatures of as many full members as spells of
``spread_s`` have passed, in which what an honest peer has reaches all others (Dolev and Strong, 1983). So if one honest
peer takes it, its own signature lets all others take it in time. After as many such spells as peers may cheat, all
honest peers have the same.

Nobody waits that long if all speak in time: full members vote on what they have heard, and the phase is over once
n - f of n have voted for the same, where less than a third cheat: two different sets cannot both get so many, as honest
peers vote once. Votes are statements too, so if one honest peer closes a phase by them, all do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from swarm_training.broadcast.signed import Statement

_MOST = 2  # different ones of a peer in one place: two are enough to tell that it equivocates


def most_cheaters(num_members: int) -> int:
    """Fewer than a third."""
    return (num_members - 1) // 3


class Agreement:
    """On one phase. Times are those of one clock, in seconds.

    Attributes:
        expected: who must speak, sorted.
        statements: what has been taken of each, by sender.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.expected: tuple[str, ...] = ()
        self.statements: dict[str, list[Statement]] = {}
        self._votes: dict[str, list[Statement]] = {}
        self._electorate: tuple[str, ...] = ()
        self._deadline_s: float | None = None  # None: this peer has not come to the phase yet
        self._spread_s = 0.0
        self.has_voted = False

    def open(self, expected: Iterable[str], electorate: Iterable[str], deadline_s: float, spread_s: float) -> None:
        """This peer has come to the phase. ``electorate``: the full members."""
        self.expected, self._electorate = tuple(sorted(expected)), tuple(sorted(electorate))
        self._deadline_s, self._spread_s = deadline_s, spread_s

    @property
    def end_s(self) -> float:
        """After which nothing counts any more."""
        assert self._deadline_s is not None
        return self._deadline_s + most_cheaters(len(self._electorate)) * self._spread_s

    def needs_endorsement(self, now: float) -> bool:
        """Whether what is taken now may reach others after the deadline."""
        return self._deadline_s is not None and now > self._deadline_s - self._spread_s

    def take(self, statement: Statement, endorsers: Iterable[str], now: float) -> bool:
        """Whether it is new and counts; then it must be passed on to all."""
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
        """What this peer votes for, once: it has heard all, one statement of each, in time."""
        if self.has_voted or self._deadline_s is None or now > self._deadline_s:
            return None
        if any(len(self.statements.get(name, ())) != 1 for name in self.expected):
            return None
        self.has_voted = True
        return tuple(self.statements[name][0].digest for name in self.expected)

    def outcome(self, now: float) -> Mapping[str, Statement] | None:
        """The statements that count, one of each sender; None while that is open. After the end, of two the one whose
        digest is lower."""
        if self._deadline_s is None:
            return None
        if (certified := self._certified()) is not None:
            return certified
        if now <= self.end_s:
            return None
        heard = {name: self.statements[name] for name in self.expected if self.statements.get(name)}
        return {name: min(each, key=lambda statement: statement.digest) for name, each in heard.items()}

    def has_majority(self, heard: Collection[str]) -> bool:
        """Whether most full members have spoken, if most were expected to; otherwise this peer may be cut off."""
        expected = set(self.expected).intersection(self._electorate)
        return 2 * len(expected) <= len(self._electorate) or 2 * len(expected.intersection(heard)) > len(expected)

    def equivocations(self) -> dict[str, tuple[Statement, Statement]]:
        """By sender."""
        return {name: (each[0], each[1]) for name, each in self.statements.items() if len(each) == _MOST}

    def _certified(self) -> Mapping[str, Statement] | None:
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

    def _find(self, name: str, digest: bytes) -> Statement | None:
        return next((each for each in self.statements.get(name, ()) if each.digest == digest), None)
