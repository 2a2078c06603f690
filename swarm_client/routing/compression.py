"""The choice of a codec, which sets in how few bytes hidden states travel over a link. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf

from swarm_protocol.codecs.sizes import ALWAYS_KNOWN, LADDER, encoded_bytes
from swarm_protocol.dht.records import ServerRecord

_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")
_NEEDS_NO_MEASURING = frozenset({"raw", "bf16"})  # servers with GPUs round to bfloat16 anyway
_SHARE = 0.05  # allowed time for sending, as a share of the computing time: a token waits for it on each link
_FLOAT_BYTES = 4  # the size of a number in the hidden states by which servers announce their network speed


@dataclass(frozen=True)
class Link:
    """A link between two servers, or between a server and the client.

    Attributes:
        bytes_per_s: the rate; infinite if it is unknown, or if both ends are on one machine.
        tokens_per_s: the most positions per second, of all sessions together, that the slower end can compute.
        known: the codecs that both ends read and write.
    """

    bytes_per_s: float = inf
    tokens_per_s: float = 0.0
    known: frozenset[str] = ALWAYS_KNOWN


def known_to(*servers: ServerRecord) -> frozenset[str]:
    """Return the codecs that all of these servers read and write."""
    return frozenset(LADDER).intersection(*(ALWAYS_KNOWN.union(server.codecs) for server in servers))


def computed_per_s(server: ServerRecord) -> float:
    """Return the most positions per second that the server can compute, with as many at once as it takes."""
    return max(server.forward_tokens_per_s, server.tokens_per_s)


def is_on_this_machine(server: ServerRecord) -> bool:
    """Return whether data for the server goes through no network."""
    return bool(server.addresses) and server.addresses[0].startswith(_LOOPBACK)


def client_link(server: ServerRecord, bytes_per_s: float) -> Link:
    """Return the link between client and server. ``bytes_per_s``: the measured rate; infinite if there is none."""
    measured = inf if is_on_this_machine(server) else bytes_per_s
    return Link(measured, computed_per_s(server), known_to(server))


def server_link(one: ServerRecord, other: ServerRecord, width: int) -> Link:
    """Return the link that two servers' records describe. ``width``: the numbers in a position's hidden states."""
    said = [s.network_tokens_per_s * width * _FLOAT_BYTES for s in (one, other) if s.network_tokens_per_s]
    if is_on_this_machine(one) and is_on_this_machine(other):
        said = []
    return Link(min(said, default=inf), min(computed_per_s(one), computed_per_s(other)), known_to(one, other))


def codec_for(link: Link, width: int, item_bytes: int, allowed: Collection[str]) -> str:
    """Return the most exact allowed codec with which sending takes at most a twentieth of the computing time.

    If no codec is that fast, return the one with the fewest bytes. ``item_bytes``: the size of an element of the model.
    """
    usable = [name for name in LADDER if name in link.known and (name in allowed or name == "raw")]
    for name in usable:
        if encoded_bytes(name, 1, width, item_bytes) * link.tokens_per_s <= _SHARE * link.bytes_per_s:
            return name
    return min(usable, key=lambda name: encoded_bytes(name, 1, width, item_bytes))


def forced(name: str, known: Collection[str]) -> str:
    """Return this codec, or the next more exact one that both ends know."""
    steps = LADDER[: LADDER.index(name) + 1]
    return next(step for step in reversed(steps) if step in known)


def within(errors: Mapping[str, float], bound: float) -> frozenset[str]:
    """Return the codecs whose measured error is within the bound, and those that need no measuring."""
    return _NEEDS_NO_MEASURING | {name for name, error in errors.items() if error <= bound}


def to_measure(errors: Mapping[str, float]) -> list[str]:
    """Return the codecs whose error is not known yet."""
    return [name for name in LADDER if name not in _NEEDS_NO_MEASURING and name not in errors]
