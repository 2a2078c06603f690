"""Server records: their content, their DHT keys, and the view of a swarm that they form together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Any

from google.protobuf.message import DecodeError

from swarm_protocol.codecs.sizes import CODEC_NAMES, CODECS
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import MAX_ADDRESSES, MAX_NAME_CHARS, MAX_TENSOR_BYTES, WIRE_VERSION
from swarm_protocol.wire.printable import printable

REFRESH_S = 20.0  # servers republish records this often, because the nodes that store them may fail
LIFETIME_S = 120.0
CLOCK_TOLERANCE_S = 10.0  # how far another machine's clock may be ahead
MAX_LIFETIME_S = LIFETIME_S + CLOCK_TOLERANCE_S  # records that expire later are neither stored nor read
MAX_BLOCKS = 4096  # per model
MAX_BLOCKS_PER_S = 100_000.0  # decoding: a block takes longer than 10 us, mostly to launch its kernels
MAX_FORWARD_BLOCKS_PER_S = 1e8  # positions x blocks: about what a machine with eight of the fastest GPUs reaches
MAX_NETWORK_TOKENS_PER_S = 1e8  # small hidden states over a link of 400 Gbit/s
MAX_WORK = 2**53  # positions x blocks: a double represents every integer up to this exactly
_MAX_NEIGHBOURS = 64  # round-trip times in a record; servers publish 8
_MAX_ADAPTERS = 256
_MAX_CODECS = 32
_DIGEST_BYTES = 32
_PLAIN = (  # the fields that a record and its message have in common, with the same values
    *("peer_id", "model", "revision", "num_blocks", "quant", "dtype", "device", "cache_tokens_left", "queue_delay_s"),
    *("tls_fingerprint", "wire_version", "software_version", "max_request_bytes", "pinned", "token", "cache_tokens"),
    *("relay_address", "weights", "joins"),
)
_KIND = re.compile(r"[\w.-]{0,32}", re.ASCII)  # the name of a quantisation, dtype or device
KV8 = "-kv8"  # ends the quantisation of a server that stores keys and values in int8
ROOT_SHARD = "all"  # readers begin here; swarm_protocol/dht/shards.py has the other shards


class ServerState(IntEnum):
    JOINING = pb.JOINING
    ONLINE = pb.ONLINE
    DRAINING = pb.DRAINING
    OFFLINE = pb.OFFLINE  # withdrawn; kept in the DHT until the older record has expired


@dataclass(frozen=True)
class WorkTotals:
    """The work that a server claims to have done since its start; see ``protos/swarm.proto``."""

    decoded: int = 0
    prompts: int = 0
    passes: int = 0
    uptime_s: float = 0.0

    def tokens(self, num_blocks: int) -> float:
        """Return the work as a number of positions through a whole model of ``num_blocks`` blocks."""
        return (self.decoded + self.prompts + self.passes) / num_blocks

    def to_proto(self) -> pb.Work:
        return pb.Work(decoded=self.decoded, prompts=self.prompts, passes=self.passes, uptime_s=self.uptime_s)

    @classmethod
    def from_proto(cls, message: pb.Work) -> WorkTotals:
        """Parse the counts, capped at what hardware can do in ``uptime_s``; raise ValueError if that is invalid."""
        if not 0 <= message.uptime_s < inf:
            raise ValueError(f"the uptime is {message.uptime_s}: expected a finite number of at least 0")
        most = int(min(MAX_FORWARD_BLOCKS_PER_S * message.uptime_s, MAX_WORK))
        decoded, prompts, passes = (min(count, most) for count in (message.decoded, message.prompts, message.passes))
        return cls(decoded, prompts, passes, message.uptime_s)


@dataclass(frozen=True)
class ServerRecord:
    """One server's entry in the DHT; ``protos/swarm.proto`` describes the fields."""

    peer_id: str
    addresses: tuple[str, ...]
    model: str
    revision: str
    num_blocks: int
    span: Span
    state: ServerState = ServerState.ONLINE
    quant: str = "none"
    dtype: str = "float32"
    device: str = "cpu"
    tokens_per_s: float = 0.0
    cache_tokens_left: int = 0
    queue_delay_s: float = 0.0
    tls_fingerprint: bytes = b""
    next_hop_rtts_s: Mapping[str, float] = field(default_factory=dict)
    adapters: tuple[str, ...] = ()
    wire_version: int = WIRE_VERSION
    software_version: str = ""
    max_request_bytes: int = MAX_TENSOR_BYTES
    forward_tokens_per_s: float = 0.0
    network_tokens_per_s: float = 0.0
    pinned: bool = False
    next_span: Span | None = None
    work: WorkTotals = WorkTotals()
    cache_tokens: int = 0
    codecs: tuple[str, ...] = ()  # names, besides the codecs that all peers know
    relay_address: str = ""
    weights: bytes = b""  # digest of the manifest of the files that the server offers
    joins: bool = False  # it computes positions that attend to later ones; see ``BlockInput.joined``
    members: int = 1  # processes or devices that compute each block together; the speeds are those of all of them
    token: bytes = field(default=b"", repr=False)  # shown by a member of a private swarm
    expires_at: float = field(default=inf, compare=False)  # DHT time (Unix, in seconds); known from the DHT, not sent

    @property
    def short_id(self) -> str:
        return short_id(self.peer_id)

    @property
    def kind(self) -> tuple[str, str, str]:
        """Return quantisation, dtype and device: servers of the same kind round in the same way."""
        return self.quant, self.dtype, self.device

    def to_proto(self) -> pb.ServerRecord:
        plain: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        return pb.ServerRecord(
            **plain,
            addresses=self.addresses,
            blocks=pb.Span(start=self.span.start, end=self.span.end),
            state=self.state.name,
            tokens_per_s=self.tokens_per_s,
            next_hop_rtts_s=dict(self.next_hop_rtts_s),
            adapters=self.adapters,
            forward_tokens_per_s=self.forward_tokens_per_s,
            network_tokens_per_s=self.network_tokens_per_s,
            work=self.work.to_proto(),
            codecs=[CODECS[name] for name in self.codecs],
            members=0 if self.members == 1 else self.members,  # records without the field mean 1
            next_blocks=None if self.next_span is None else pb.Span(start=self.next_span.start, end=self.next_span.end),
        )

    @classmethod
    def from_proto(cls, message: pb.ServerRecord) -> ServerRecord:
        """Parse a record from an untrusted peer; raise ValueError if a field is out of range.

        Speeds beyond the limits of hardware are capped. No later use of a record takes time in proportion to a number
        in the record.
        """
        if message.num_blocks > MAX_BLOCKS:
            raise ValueError(f"the model has {message.num_blocks} blocks: expected at most {MAX_BLOCKS}")
        span = Span(message.blocks.start, message.blocks.end).within(message.num_blocks)
        next_span = None
        if message.HasField("next_blocks"):
            next_span = Span(message.next_blocks.start, message.next_blocks.end).within(message.num_blocks)
        _check_numbers(message)
        _check_texts(message)
        plain: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
        return cls(
            **plain,
            addresses=tuple(message.addresses),
            span=span,
            state=ServerState(message.state),
            tokens_per_s=min(message.tokens_per_s, MAX_BLOCKS_PER_S / len(span)),
            next_hop_rtts_s=dict(message.next_hop_rtts_s),
            adapters=tuple(message.adapters),
            forward_tokens_per_s=min(message.forward_tokens_per_s, MAX_FORWARD_BLOCKS_PER_S / len(span)),
            network_tokens_per_s=min(message.network_tokens_per_s, MAX_NETWORK_TOKENS_PER_S),
            next_span=next_span,
            work=WorkTotals.from_proto(message.work),
            codecs=tuple(CODEC_NAMES[codec] for codec in message.codecs if codec in CODEC_NAMES),
            members=max(1, message.members),
        )

    @classmethod
    def parse(cls, data: bytes) -> ServerRecord:
        """Parse a record; raise ValueError if the bytes are no valid record."""
        try:
            return cls.from_proto(pb.ServerRecord.FromString(data))
        except DecodeError as error:
            raise ValueError(f"no server record: {error}") from None


def _check_numbers(message: pb.ServerRecord) -> None:
    """Raise ValueError if a measurement is out of range, or there are too many entries of a kind."""
    speeds = message.tokens_per_s, message.forward_tokens_per_s, message.network_tokens_per_s
    for number in (*speeds, message.queue_delay_s, *message.next_hop_rtts_s.values()):
        if not 0 <= number < inf:
            raise ValueError(f"a measurement is {number}: expected a finite number of at least 0")
    for entries, most, what in (
        (message.addresses, MAX_ADDRESSES, "addresses"),
        (message.adapters, _MAX_ADAPTERS, "adapters"),
        (message.next_hop_rtts_s, _MAX_NEIGHBOURS, "round-trip times"),
        (message.codecs, _MAX_CODECS, "codecs"),
    ):
        if len(entries) > most:
            raise ValueError(f"there are {len(entries)} {what}: expected at most {most}")


def _check_texts(message: pb.ServerRecord) -> None:
    """Raise ValueError if a name or a digest is not one that a server can have."""
    for kind in (message.quant, message.dtype, message.device):
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{printable(kind, 40)!r} is no name of a kind of numbers: expected one such as int8")
    for digest, what in ((message.tls_fingerprint, "fingerprint"), (message.weights, "digest of weights")):
        if len(digest) > _DIGEST_BYTES:
            raise ValueError(f"the {what} has {len(digest)} bytes: expected {_DIGEST_BYTES}")
    texts = message.peer_id, message.model, message.revision, message.quant, message.dtype, message.software_version
    for text in (*texts, message.relay_address, *message.addresses, *message.adapters, *message.next_hop_rtts_s):
        if len(text) > MAX_NAME_CHARS or not text.isprintable():
            raise ValueError(f"{printable(text, 40)!r} is no name: expected {MAX_NAME_CHARS} printable characters")


def short_id(peer_id: str) -> str:
    """Return the end of the peer id, which is enough to distinguish servers in a log line."""
    return "…" + printable(peer_id[-6:])


@dataclass(frozen=True)
class GroupCandidate:
    """A process that can be a member of a group of servers which compute together.

    Attributes:
        name: a random name, which the process keeps until it ends.
        address: HOST:PORT where it waits for followers.
        leads: whether it leads the group at present.
    """

    name: str
    address: str
    leads: bool


@dataclass(frozen=True)
class SwarmView:
    """The servers of one model, as read from the DHT at one moment."""

    servers: tuple[ServerRecord, ...] = ()

    @classmethod
    def of(cls, servers: Iterable[ServerRecord]) -> SwarmView:
        """Create a view whose servers are sorted by span, then peer id, so that equal swarms give equal views."""
        return cls(tuple(sorted(servers, key=lambda server: (server.span, server.peer_id))))

    def online(self) -> tuple[ServerRecord, ...]:
        return tuple(server for server in self.servers if server.state is ServerState.ONLINE)

    def replicas(self, num_blocks: int) -> list[int]:
        """Return for each block of the model how many online servers hold it."""
        counts = [0] * num_blocks
        for server in self.online():
            for block in range(server.span.start, min(server.span.end, num_blocks)):
                counts[block] += 1
        return counts


def servers_key(swarm: str, model: str, shard: str = ROOT_SHARD) -> str:
    """Return the DHT key whose subkeys are servers of one model."""
    return f"swarm.v1/{swarm}/servers/{shard}/{model}"


def revocations_key(swarm: str) -> str:
    """Return the DHT key whose subkeys are the ids of grants that a private swarm's organiser has revoked."""
    return f"swarm.v1/{swarm}/revocations"


def group_key_of(swarm: str, digest: str) -> str:
    """Return the DHT key of the candidates for a group; ``digest`` comes from its secret."""
    return f"swarm.v1/{swarm}/group/{digest}"


def accusations_key(swarm: str, model: str) -> str:
    """Return the DHT key whose subkeys are servers that have accused other servers of wrong answers."""
    return f"swarm.v1/{swarm}/accusations/{model}"


def models_key(swarm: str, shard: int) -> str:
    """Return the DHT key of one part of the list of models (see ``swarm_protocol.dht.claims``), by server."""
    return f"swarm.v1/{swarm}/models/{shard}"
