"""What came of a check."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.span import Span


@dataclass(frozen=True)
class Lie:
    """A server's answer differs from that of two others, or from its own to the same question.

    Attributes:
        server: its peer id; ``span``: the blocks.
        witnesses: peer ids of those that say otherwise.
    """

    server: str
    span: Span
    witnesses: tuple[str, ...]


@dataclass(frozen=True)
class Disagreement:
    """Two servers answer differently over the same blocks, and there is no third that decides."""

    servers: tuple[str, ...]
    span: Span


@dataclass(frozen=True)
class Verdict:
    """Of one check of a chain.

    Attributes:
        passed: peer ids of the chain's servers that were found to answer rightly.
        lies: shown; ``disagreements``: not decided.
        suspects: peer ids of the chain, one of which answers rightly only when it is asked by itself.
        unchecked: blocks that no other server has; or all, if the check could not be made.
    """

    passed: frozenset[str] = frozenset()
    lies: tuple[Lie, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    suspects: frozenset[str] = frozenset()
    unchecked: tuple[Span, ...] = ()

    @property
    def has_found(self) -> bool:
        """Whether answers were compared at all."""
        return bool(self.passed or self.distrusted or self.disagreements)

    @property
    def distrusted(self) -> frozenset[str]:
        """Peer ids of servers that must not go on."""
        return self.suspects | {lie.server for lie in self.lies}
