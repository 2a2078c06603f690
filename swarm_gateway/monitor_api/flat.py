"""Observations of a swarm as flat JSON.

The names of the fields are part of the interface: docs/reference/monitor-api.md lists them. Servers' statements about
themselves were checked when their records were read. Their text still comes from strangers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from math import isfinite
from typing import Any

from swarm_gateway.history.recorder import Observation, sample_of
from swarm_gateway.history.store import StoredEvent
from swarm_gateway.history.work import Rate, Tally
from swarm_gateway.monitor.model_monitor import UNREACHABLE, ModelStatus, ServerStatus
from swarm_gateway.monitor_api.joining import Invitation
from swarm_models.checkpoints.checkpoint import is_fingerprint
from swarm_protocol.dht.records import short_id
from swarm_protocol.wire.constants import WIRE_VERSION

Flat = dict[str, Any]
OK, DEGRADED, DOWN = "ok", "degraded", "down"


def swarm_json(
    seen: Observation, invitation: Invitation, own_model: str, load: Mapping[str, int], *, own_is_directory: bool
) -> Flat:
    """Return the state of the whole swarm. The fields of ``load``, this gateway's load, are added as they are."""
    models = seen.models
    sample = sample_of(seen)
    states = [status.state_of(server) for status in models for server in status.servers]
    status, reasons = health_of(seen, own_model)
    return {
        "swarm": invitation.swarm,
        "time": seen.time,
        "status": status,
        "reasons": reasons,
        "stale_s": seen.snapshot.stale_s if seen.snapshot else None,
        "models": len(models),
        "models_complete": sum(not status.missing for status in models),
        "servers": len(states),
        "servers_online": states.count("online"),
        "servers_unreachable": states.count(UNREACHABLE),
        "blocks": sum(status.num_blocks for status in models),
        "blocks_missing": int(sample.blocks_missing),
        "tokens_per_s": sample.tokens_per_s,
        "prompt_tokens_per_s": sample.prompt_tokens_per_s,
        "training_tokens_per_s": sum((seen.rate(status.model) for status in models), Rate()).passes,
        "queue_delay_s": sample.queue_delay_s,
        "kv_used": sample.kv_used,
        **load,
        "version": metadata.version("swarm-lm"),
        "wire_version": WIRE_VERSION,
        "private": invitation.is_private,
        "own_model": own_model,
        # Without servers of the own model, the command is made from its name alone.
        **next(
            (_joining(status, invitation) for status in models if status.model == own_model),
            invitation.as_json(own_model, is_directory=own_is_directory),
        ),
    }


def health_of(seen: Observation, own_model: str) -> tuple[str, list[str]]:
    """Return the status and its reasons. Down means that the model of this gateway cannot be used."""
    if seen.snapshot is None:
        return DOWN, [seen.trouble or "the swarm has not been looked at yet"]
    statuses = {status.model: status for status in seen.snapshot.models}
    own = statuses.get(own_model)
    reasons = [f"the last look at the swarm has failed: {seen.trouble}"] if seen.trouble else []
    if seen.snapshot.stale_s is not None:
        reasons.append(f"the DHT cannot be read; the servers shown were read {seen.snapshot.stale_s:.0f} s ago")
    if own is None:
        reasons.append(f"no server holds blocks of model {own_model}")
    reasons += _gaps(statuses.values())
    if own is None or own.missing or own.denied:
        return DOWN, reasons
    return (DEGRADED if reasons else OK), reasons


def _gaps(statuses: Iterable[ModelStatus]) -> Iterator[str]:
    """Yield one reason for a model's missing blocks, and one for its blocks whose servers deny access."""
    for status in statuses:
        for spans, what in ((status.missing, "no server holds"), (status.denied, "servers deny access to")):
            if spans:
                yield f"{what} blocks {', '.join(map(str, spans))} of model {status.model}"


def model_json(seen: Observation, status: ModelStatus, invitation: Invitation) -> Flat:
    rate, chain = seen.rate(status.model), status.chain
    return {
        "model": status.model,
        "revision": status.revision,
        "num_blocks": status.num_blocks,
        "servers": len(status.servers),
        "replicas": status.replicas,
        "blocks_missing": sum(map(len, status.missing)),
        "missing": [str(span) for span in status.missing],
        "denied": [str(span) for span in status.denied],
        "chain": [{"peer_id": hop.server.peer_id, "start": hop.span.start, "end": hop.span.end} for hop in chain],
        "chain_tokens_per_s": status.tokens_per_s if chain else None,
        "no_chain": status.no_chain,
        "tokens_per_s": rate.decoded,
        "prompt_tokens_per_s": rate.prompts,
        "training_tokens_per_s": rate.passes,
        **_joining(status, invitation),
    }


def _joining(status: ModelStatus, invitation: Invitation) -> Flat:
    is_offered = any(status.serves(server) and server.record.weights for server in status.servers)
    return invitation.as_json(status.model, is_directory=is_fingerprint(status.revision), is_offered=is_offered)


def server_json(seen: Observation, status: ModelStatus, server: ServerStatus) -> Flat:
    record, tally = server.record, seen.tallies.get((status.model, server.record.peer_id))
    rate = seen.rate_of(status.model, server)
    return {
        "model": status.model,
        "peer_id": record.peer_id,
        "short_id": record.short_id,
        "start": record.span.start,
        "end": record.span.end,
        "num_blocks": record.num_blocks,
        "next_start": None if record.next_span is None else record.next_span.start,
        "next_end": None if record.next_span is None else record.next_span.end,
        "state": status.state_of(server),
        "usable": status.serves(server),
        "on_chain": any(hop.server.peer_id == record.peer_id for hop in status.chain),
        "denial": server.denial,
        "decode_tokens_per_s": record.tokens_per_s,
        "forward_tokens_per_s": record.forward_tokens_per_s,
        "network_tokens_per_s": record.network_tokens_per_s or None,
        "tokens_per_s": rate.decoded,
        "prompt_tokens_per_s": rate.prompts,
        "training_tokens_per_s": rate.passes,
        "queue_delay_s": record.queue_delay_s,
        "kv_tokens_free": record.cache_tokens_left,
        "kv_tokens": record.cache_tokens or None,
        "rtt_s": server.rtt_s,
        "uptime_s": record.work.uptime_s or None,
        "contributed_tokens": 0.0 if tally is None else tally.tokens,
        "version": record.software_version,
        "wire_version": record.wire_version,
        "revision": record.revision,
        "quant": record.quant,
        "dtype": record.dtype,
        "device": record.device,
        "members": record.members,
        "adapters": list(record.adapters),
        "address": record.addresses[0] if record.addresses else "",
        "pinned": record.pinned,
        "expires_at": record.expires_at if isfinite(record.expires_at) else None,
    }


def contributions_json(seen: Observation, most: int) -> list[Flat]:
    """Return the contributions of known servers, the largest first, at most ``most``."""
    here = {(status.model, server.record.peer_id) for status in seen.models for server in status.servers}
    tallies = sorted(seen.tallies.values(), key=lambda tally: -tally.tokens)[:most]
    return [_tally_json(tally, (tally.model, tally.peer_id) in here) for tally in tallies]


def _tally_json(tally: Tally, is_here: bool) -> Flat:
    total = tally.total
    return {
        "model": tally.model,
        "peer_id": tally.peer_id,
        "short_id": short_id(tally.peer_id),
        "here": is_here,
        "contributed_tokens": tally.tokens,
        "decoded_tokens": total.decoded / tally.num_blocks,
        "prompt_tokens": total.prompts / tally.num_blocks,
        "training_tokens": total.passes / tally.num_blocks,
        "uptime_s": total.uptime_s,
        "first_seen": tally.since,
        "last_seen": tally.last.time,
    }


def event_json(stored: StoredEvent) -> Flat:
    event = stored.event
    return {
        "id": stored.id,
        "time": stored.time,
        "kind": str(event.kind),
        "model": event.model,
        "peer_id": event.peer_id,
        "short_id": short_id(event.peer_id) if event.peer_id else "",
        "blocks": event.blocks,
        "state": event.state,
        "before": event.before,
    }
