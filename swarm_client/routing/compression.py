"""In how few bytes hidden states travel over a link. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from swarm_protocol.codecs.sizes import ALWAYS_KNOWN, LADDER, encoded_bytes
from swarm_protocol.dht.records import ServerRecord

_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")
_NEEDS_NO_MEASURING = frozenset({"raw", "bf16"})  # bfloat16 rounds as servers with GPUs do anyway
_SHARE = 0.05  # of the time of computing that sending may take: a token of one session waits for it, link by link
_FLOAT_BYTES = 4  # of a number in the hidden states by which servers count


@dataclass(frozen=True)
class Link:
    """Between two servers, or a server and the client.

    Attributes:
        bytes_per_s: that pass; infinite if nobody knows, or both ends are on one machine.
        tokens_per_s: that its ends can compute at most, positions of all sessions together; the slower end counts.
        known: codecs that both ends know.
    """

    bytes_per_s: float = inf
    tokens_per_s: float = 0.0
    known: frozenset[str] = ALWAYS_KNOWN


def known_to(*servers: ServerRecord) -> frozenset[str]:
    """Codecs that all of them read and write."""
    return frozenset(LADDER).intersection(*(ALWAYS_KNOWN.union(server.codecs) for server in servers))


def computed_per_s(server: ServerRecord) -> float:
    """Positions per second, as many as it can compute at once."""
    return max(server.forward_tokens_per_s, server.tokens_per_s)


def is_on_this_machine(server: ServerRecord) -> bool:
    """Whether what is sent to it goes through no network."""
    return bool(server.addresses) and server.addresses[0].startswith(_LOOPBACK)


def client_link(server: ServerRecord, bytes_per_s: float) -> Link:
    """``bytes_per_s``: that the client has measured; infinite if it has not."""
    measured = inf if is_on_this_machine(server) else bytes_per_s
    return Link(measured, computed_per_s(server), known_to(server))


def server_link(one: ServerRecord, other: ServerRecord, width: int) -> Link:
    """By what the two say of themselves. ``width``: numbers in the hidden states of a position."""
    said = [s.network_tokens_per_s * width * _FLOAT_BYTES for s in (one, other) if s.network_tokens_per_s]
    if is_on_this_machine(one) and is_on_this_machine(other):
        said = []
    return Link(min(said, default=inf), min(computed_per_s(one), computed_per_s(other)), known_to(one, other))


def codec_for(link: Link, width: int, item_bytes: int, allowed: Collection[str]) -> str:
    """The most exact of the allowed codecs with which sending takes a twentieth of the time of computing at most.

    The smallest of them if it never does.
    """
    usable = [name for name in LADDER if name in link.known and (name in allowed or name == "raw")]
    for name in usable:
        if encoded_bytes(name, 1, width, item_bytes) * link.tokens_per_s <= _SHARE * link.bytes_per_s:
            return name
    return min(usable, key=lambda name: encoded_bytes(name, 1, width, item_bytes))


def forced(name: str, known: Collection[str]) -> str:
    """This codec, or the next more exact one that both ends know."""
    steps = LADDER[: LADDER.index(name) + 1]
    return next(step for step in reversed(steps) if step in known)


def within(errors: Mapping[str, float], bound: float) -> frozenset[str]:
    """The codecs whose measured error is within the bound, and those that need no measuring."""
    return _NEEDS_NO_MEASURING | {name for name, error in errors.items() if error <= bound}


def to_measure(errors: Mapping[str, float]) -> list[str]:
    """Codecs whose error is not known yet."""
    return [name for name in LADDER if name not in _NEEDS_NO_MEASURING and name not in errors]
