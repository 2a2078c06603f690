"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.span import Span


@dataclass(frozen=True)
class Lie:
    """A proven lie: a server's answer differs from that of two others, or from its own earlier answer.

    Attributes:
        server: the server's peer id; ``span``: the blocks.
        witnesses: the peer ids of servers that answer otherwise.
    """

    server: str
    span: Span
    witnesses: tuple[str, ...]


@dataclass(frozen=True)
class Disagreement:
    """An undecided difference: two servers answer differently over the same blocks, and no third one decides."""

    servers: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class CheckVerdict:
    """The verdict of one check of a chain.

    Attributes:
        passed: the peer ids of the chain's servers whose answers were right.
        lies: proven lies; ``disagreements``: undecided differences.
        suspects: the peer ids of the chain, if at least one of its servers answers rightly only when asked alone.
        unchecked: the blocks that no other server has, or all blocks if the check could not be made.
    """

    passed: frozenset[str] = frozenset()
    lies: tuple[Lie, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    suspects: frozenset[str] = frozenset()
    unchecked: tuple[Span, ...] = ()

    @property
    def has_found(self) -> bool:
        """Return whether any answers were compared."""
        return bool(self.passed or self.distrusted or self.disagreements)

    @property
    def is_wrong(self) -> bool:
        """Return whether some server lies, or servers differ."""
        return bool(self.lies or self.disagreements)

    @property
    def distrusted(self) -> frozenset[str]:
        """Return the peer ids of servers that must not continue."""
        return self.suspects | {lie.server for lie in self.lies}
