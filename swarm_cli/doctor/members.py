"""The checks of the swarm: servers registered on this machine, servers that answer, and how others reach ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import suppress
from math import isfinite
from statistics import median

from swarm_cli.doctor.check import DoctorCheck, Finding, failed, ok, warning
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_gateway.monitor.status import read_status
from swarm_protocol.dht.records import LIFETIME_S, REFRESH_S, short_id
from swarm_protocol.errors import NoSwarm, SwarmError
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM, LocalRegistry, RegistryEntry, is_loopback
from swarm_protocol.tunnel.circuit import relay_of
from swarm_protocol.wire.constants import WIRE_VERSION
from swarm_protocol.wire.printable import printable

_LOOK_S = 45.0  # joining, reading and asking have their own limits
_LOOK_AGAIN_S = 15.0
_SPARE_S = 5.0  # the part of ``_LOOK_S`` that the second read leaves, so that the first is not lost
_AGE_S = REFRESH_S / 2  # of a record, on average
_CLOCK_S = 15.0  # a smaller difference may come from the age of records


def swarm_checks(config: ClientConfig) -> list[DoctorCheck]:
    return [
        DoctorCheck("servers here", lambda: [registered(config.swarm, LocalRegistry(config.swarm).servers())]),
        DoctorCheck("swarm", lambda: _swarm(config), _LOOK_S),
    ]


def registered(swarm: str, entries: Sequence[RegistryEntry]) -> Finding:
    alive = [entry for entry in entries if entry.is_alive]
    if len(alive) < len(entries):
        dead = ", ".join(short_id(entry.peer_id) for entry in entries if not entry.is_alive)
        found = f"{len(alive)} of swarm {swarm}; {dead} of another host or container may have ended"
        return warning("servers here", found, "nothing: if they have ended, they are forgotten in ten minutes")
    return ok("servers here", f"{len(alive) or 'none'} of swarm {swarm} on this machine")


def _swarm(config: ClientConfig) -> Iterator[Finding]:
    own = {entry.peer_id: entry for entry in LocalRegistry(config.swarm).servers() if entry.is_alive}
    try:
        snapshot = background.submit(look(config, own.keys())).result(_LOOK_S)
    except NoSwarm as error:
        if not config.initial_peers and not own and config.swarm == DEFAULT_SWARM:
            to_do = f"start one with `{typed('server')}`, or name members of another with --initial-peers"
            yield warning("swarm", "there is none on this machine", to_do)
        else:
            to_do = "check --initial-peers, --swarm, the firewalls between, and that the servers run"
            yield failed("swarm", str(error), to_do)
        return
    except SwarmError as error:
        yield failed("swarm", str(error), "see the troubleshooting page of the documentation")
        return
    yield from seen(config.swarm, snapshot, frozenset(own), time.time())
    for peer_id, entry in own.items():
        yield reached(peer_id, entry.addresses, [server for model in snapshot.models for server in model.servers])


async def look(
    config: ClientConfig,
    own: Set[str],
    read: Callable[[ClientConfig], Awaitable[SwarmSnapshot]] = read_status,
) -> SwarmSnapshot:
    """Read the swarm, and read it once more if a server of this machine is missing, of which ``own`` are the ids.

    A server that is busy answers the DHT too late, and one that has just started may be about to publish its record.
    """
    clock = asyncio.get_running_loop().time
    end_s = clock() + _LOOK_S - _SPARE_S
    snapshot = await read(config)
    listed = {server.record.peer_id for model in snapshot.models for server in model.servers}
    if not own <= listed:
        with suppress(TimeoutError, SwarmError):
            async with asyncio.timeout_at(min(end_s, clock() + _LOOK_AGAIN_S)):
                again = await read(config)
            if again.models:  # else the second read was worse than the first
                snapshot = again
    return snapshot


def seen(swarm: str, snapshot: SwarmSnapshot, own: frozenset[str], now_s: float) -> Iterator[Finding]:
    """Yield findings on a snapshot; ``own`` are the ids of this machine's servers, and ``now_s`` is Unix time."""
    if not snapshot.models:
        to_do = "give --membership" if snapshot.num_strangers else f"start one with `{typed('server')}`"
        yield failed("swarm", f"{swarm} can be joined, but has no servers for this client", to_do)
    for status in snapshot.models:
        yield _model(status)
    servers = [server for model in snapshot.models for server in model.servers]
    yield from _versions(servers)
    living = [s for s in servers if s.answers and isfinite(s.record.expires_at) and s.record.peer_id not in own]
    if living:
        yield clock([server.record.expires_at - now_s for server in living])
    elif servers:
        yield ok("clock", "cannot be compared: all servers that answer are on this machine")


def _versions(servers: Sequence[ServerStatus]) -> Iterator[Finding]:
    others = [server.record for server in servers if server.record.wire_version != WIRE_VERSION]
    if others:
        names = ", ".join(f"{record.short_id} speaks {record.wire_version}" for record in others)
        yield failed("versions", f"this machine speaks wire version {WIRE_VERSION}, but {names}", "update the older")


def _model(status: ModelStatus) -> Finding:
    name = printable(status.model)
    answering = [server for server in status.servers if server.answers]
    rtts_ms = [server.rtt_s * 1e3 for server in answering if server.rtt_s is not None]
    latency = f", in {min(rtts_ms):.1f} to {max(rtts_ms):.1f} ms" if rtts_ms else ""
    relayed = [f"{s.record.short_id} via {short_id(s.relay_id)}" for s in answering if s.relay_id]
    latency += f" ({', '.join(relayed)}; the others directly)" if relayed else ""
    found = f"model {name}: {len(answering)} of {len(status.servers)} servers answer{latency}"
    if status.denied:
        spans = ", ".join(map(str, status.denied))
        return failed("swarm", f"{found}; those of blocks {spans} do not let this client in", "give --membership")
    if status.missing:
        spans = ", ".join(map(str, status.missing))
        return failed("swarm", f"{found}; nobody serves blocks {spans}", f"start another server: `{typed('server')}`")
    if len(answering) < len(status.servers):
        silent = ", ".join(server.record.short_id for server in status.servers if not server.answers)
        to_do = "if they run: open their ports in firewalls, check --announce-address and their logs"
        return warning("swarm", f"{found}; {silent} do not", to_do)
    return ok("swarm", found)


def clock(remaining_s: Sequence[float]) -> Finding:
    """Compare clocks; ``remaining_s`` are the times until other servers' records expire, by this machine's clock."""
    # A record that is ``_AGE_S`` old has this much less than ``LIFETIME_S`` left, if the clocks agree.
    ahead_s = LIFETIME_S - _AGE_S - median(remaining_s)
    if abs(ahead_s) <= _CLOCK_S:
        return ok("clock", f"is that of {len(remaining_s)} other servers, within {_CLOCK_S:g} s")
    which = "ahead of" if ahead_s > 0 else "behind"
    found = f"is about {abs(ahead_s):.0f} s {which} the clocks of {len(remaining_s)} other servers"
    return failed("clock", found, "set it by NTP, as with `timedatectl set-ntp true`: records expire by it")


def reached(peer_id: str, addresses: Sequence[str], servers: Sequence[ServerStatus]) -> Finding:
    """Return whether other members reach a server of this machine, according to their records."""
    subject = f"server {short_id(peer_id)}"
    own = next((server for server in servers if server.record.peer_id == peer_id), None)
    if own is None:
        found = "runs here, but the swarm does not know it"
        return failed(subject, found, "wait until it is ready; if it is, see its log for why it is not announced")
    if not own.answers:
        found = f"does not answer at {', '.join(own.record.addresses)}, which it announces"
        return failed(subject, found, "see its log; open its --port, or give the --announce-address that leads to it")
    relays = dict.fromkeys(filter(None, map(relay_of, own.record.addresses)))
    how = f", through relay {' or '.join(map(short_id, relays))}: others do not reach it directly" if relays else ""
    by = {s.record.peer_id: s.record.next_hop_rtts_s[peer_id] for s in servers if peer_id in s.record.next_hop_rtts_s}
    if by:
        shown = ", ".join(f"{short_id(other)} in {rtt_s * 1e3:.1f} ms" for other, rtt_s in sorted(by.items()))
        return ok(subject, f"is reached by {shown}{how}")
    if own.relay_id:  # this client used the relay
        return ok(subject, f"is reached{how}")
    if relays:
        return ok(subject, f"answers here, and is announced{how}; no other member has said that it reaches it")
    if addresses and all(map(is_loopback, addresses)):
        found = "is reached from this machine alone"
        return warning(subject, found, "to let others in, start it with --host ADDRESS")
    to_do = (
        "servers measure the way to those whose blocks may follow theirs: if there are such on other machines, open "
        "its port for them, or give --announce-address"
    )
    return warning(subject, "answers here, and no other member has said that it reaches it", to_do)
