"""The states of a server's life; each holds exactly the data that exist in it, and transitions are pure.

Starting → Joined → Loading → Serving → Draining → Unloaded → Ended. A server that moves goes from Unloaded back to
Loading; one that is stopped while it loads goes from Loading to Unloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Self

import grpc
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.codecs.sizes import ANNOUNCED
from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.span import Span
from swarm_protocol.streams.streams import DaemonStreams
from swarm_server.core.config import ServerConfig
from swarm_server.core.counters import Counters
from swarm_server.engine.preloaded import adapter_names
from swarm_server.metrics.throughput import Speeds
from swarm_server.net.push import ChannelPool
from swarm_server.node.hosting import SpanLoader, SpanRuntime
from swarm_server.node.joining import SwarmMembership
from swarm_server.reach.reach import Reach


@dataclass(frozen=True)
class Starting:
    """The state in which the model is found, and the server is about to join the swarm."""

    config: ServerConfig
    access: SwarmAccess
    checkpoint: ModelCheckpoint
    devices: tuple[torch.device, ...]
    dtype: torch.dtype
    channels: ChannelPool
    loader: SpanLoader
    counters: Counters
    streams: DaemonStreams = field(default_factory=DaemonStreams)

    @property
    def span(self) -> Span | None:
        """Return the configured blocks, or None if the server chooses its blocks when it sees the swarm."""
        return self.config.blocks or self.config.initial_blocks


@dataclass(frozen=True)
class Joined:
    """The state in which the server has a DHT node and a port, but has not announced yet which blocks it will host."""

    starting: Starting
    membership: SwarmMembership
    grpc_server: grpc.aio.Server
    tls_fingerprint: bytes
    reach: Reach

    def load(self, span: Span) -> Loading:
        """Return the next state, with the record that this server will publish first."""
        config, checkpoint = self.starting.config, self.starting.checkpoint
        record = ServerRecord(
            codecs=ANNOUNCED,
            joins=True,
            peer_id=self.membership.dht.peer_id,
            addresses=self.reach.addresses,
            model=checkpoint.name,
            revision=checkpoint.revision,
            num_blocks=checkpoint.family.num_blocks,
            span=span,
            state=ServerState.JOINING,
            quant=config.announced_quant,
            dtype=str(self.starting.dtype).removeprefix("torch."),
            device=self.starting.devices[0].type,
            tls_fingerprint=self.tls_fingerprint,
            software_version=metadata.version("swarm-lm"),
            pinned=config.blocks is not None,
            adapters=adapter_names(config.adapters),
            token=self.starting.access.token,
        )
        return Loading(record)


# ------------------------------------------------------------ states that the swarm knows of


@dataclass(frozen=True)
class Loading:
    """The state in which the record names blocks that the server will host."""

    record: ServerRecord

    def choose(self, span: Span) -> Loading:
        """Choose another span, because other servers have chosen at the same time."""
        return Loading(replace(self.record, span=span))

    def stay_with(self, span: Span) -> Loading:
        """Keep this span permanently, because loading other blocks failed."""
        return Loading(replace(self.record, span=span, pinned=True))

    def serve(self, runtime: SpanRuntime, members: int = 1) -> Serving:
        """``members``: how many processes or devices compute each block together."""
        record = replace(self.record, span=runtime.span, state=ServerState.ONLINE, members=members)
        return Serving(record, runtime)

    def drain(self) -> Unloaded:
        return Unloaded(replace(self.record, state=ServerState.DRAINING, next_span=None))


@dataclass(frozen=True)
class _Hosting:
    record: ServerRecord
    runtime: SpanRuntime

    def measured(self, next_hop_rtts_s: Mapping[str, float], network_tokens_per_s: float) -> ServerRecord:
        """Return the record with the present measurements."""
        return replace(
            with_speeds(self.record, self.runtime.speeds),
            cache_tokens=self.runtime.cache_tokens,
            cache_tokens_left=self.runtime.cache_tokens_left,
            queue_delay_s=self.runtime.queue_delay_s,
            next_hop_rtts_s=next_hop_rtts_s,
            network_tokens_per_s=network_tokens_per_s,
        )

    def plan_move(self, to: Span) -> Self:
        """Announce the move before draining, because other servers may want to leave the same blocks."""
        return replace(self, record=replace(self.record, next_span=to))

    def stay(self) -> Self:
        """Cancel the move, because the swarm needs the server where it is."""
        return replace(self, record=replace(self.record, next_span=None))

    def drain(self, next_span: Span | None = None) -> Draining:
        """Drain before the move to ``next_span``, or before leaving the swarm if that is None."""
        return Draining(replace(self.record, state=ServerState.DRAINING, next_span=next_span), self.runtime)

    def unload(self) -> Unloaded:
        return Unloaded(with_speeds(self.record, self.runtime.speeds))


@dataclass(frozen=True)
class Serving(_Hosting):
    """The state in which the server opens sessions."""


@dataclass(frozen=True)
class Draining(_Hosting):
    """The state in which the remaining sessions end, or move to other servers."""


@dataclass(frozen=True)
class Unloaded:
    """The state in which no blocks are hosted; the record still names the previous ones."""

    record: ServerRecord

    def load(self, span: Span) -> Loading:
        return Loading(replace(self.record, state=ServerState.JOINING, span=span, next_span=None))

    def drain(self) -> Unloaded:
        return Unloaded(replace(self.record, state=ServerState.DRAINING, next_span=None))


@dataclass(frozen=True)
class Ended:
    """The state in which the record is withdrawn."""

    record: ServerRecord


State = Loading | Serving | Draining | Unloaded | Ended


def end(state: State) -> Ended:
    return Ended(replace(state.record, state=ServerState.OFFLINE))


def with_speeds(record: ServerRecord, speeds: Speeds | None) -> ServerRecord:
    """Return the record with these speeds, or unchanged if they are not known."""
    if speeds is None:
        return record
    return replace(record, tokens_per_s=speeds.decode_tokens_per_s, forward_tokens_per_s=speeds.forward_tokens_per_s)
