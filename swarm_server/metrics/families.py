"""Metrics of what a server counts, and of its present state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_server.core.counters import Counters, Distribution
from swarm_server.kv.offload import KvOffload
from swarm_server.sessions.host import SessionManager

PREFIX = "swarm_server_"


def counted(counters: Counters) -> Iterator[Metric]:
    """Yield the metrics of the counters. Any thread may call this."""
    yield _counter("positions", "Rows x positions, by what was done with them.", counters.positions, "kind")
    yield _counter("block_positions", "Computed rows x positions x blocks.", counters.block_positions, "kind")
    yield _histogram("batch_rows", "Rows of each batch of steps.", {"": counters.batch_rows})
    yield _histogram("queue_wait_seconds", "Time that work waited for the compute thread.", counters.wait_s, "kind")
    yield _counter("compute_seconds", "Busy time of the compute thread.", counters.compute_s, "kind")
    yield _counter("calls", "Calls by method of the gRPC service.", counters.calls, "method")
    yield _counter("refusals", "Refused calls and steps by gRPC status.", counters.refusals, "status")
    yield _counter("received_bytes", "Bytes of messages from callers.", counters.received_bytes)
    yield _counter(
        "sent_bytes", "Bytes of replies, of hidden states for next hops, and of copies.", counters.sent_bytes, "kind"
    )
    yield _counter(
        "sessions_opened", "Opened sessions: new ones, and replacements of others.", counters.sessions, "kind"
    )
    yield _counter(
        "sessions_parked", "Times that idle sessions left the KV cache, and came back.", counters.parked, "kind"
    )
    yield _counter("moves", "Moves to other blocks.", counters.moves)
    yield _counter("daemon_restarts", "Restarts of the libp2p daemon.", counters.daemon_restarts)


def state(record: ServerRecord, sessions: SessionManager | None) -> Iterator[Metric]:
    """Yield the metrics of the state; call this on the event loop. ``sessions`` is None while no blocks are hosted."""
    about = {
        "model": record.model,
        "revision": record.revision,
        "quant": record.quant,
        "dtype": record.dtype,
        "device": record.device,
        "version": record.software_version,
        "peer": record.peer_id,
    }
    yield _gauge("info", "Facts about the server, as labels.", [(tuple(about.values()), 1)], *about)
    is_in = [((each.name.lower(),), int(each is record.state)) for each in ServerState]
    yield _gauge("state", "1 for the present state of the server, 0 for others.", is_in, "state")
    yield _gauge("model_blocks", "Number of blocks of the model.", [((record.model,), record.num_blocks)], "model")
    hosted = [((record.model, str(block)), 1) for block in record.span] if sessions is not None else []
    yield _gauge("block_hosted", "1 for each block that is hosted.", hosted, "model", "block")
    speeds = {"decode": record.tokens_per_s, "forward": record.forward_tokens_per_s}
    speeds["network"] = record.network_tokens_per_s
    announced = [((kind,), value) for kind, value in speeds.items()]
    yield _gauge(
        "announced_tokens_per_second", "Announced speed, by which others plan; 0: not known.", announced, "kind"
    )
    yield _gauge(
        "announced_queue_delay_seconds", "Announced queueing time, by which others plan.", record.queue_delay_s
    )
    budget = None if sessions is None else sessions.services.budget
    yield _gauge("sessions", "Open sessions.", 0 if sessions is None else sessions.num_sessions)
    yield _gauge("sessions_waiting", "Sessions that wait for room.", 0 if sessions is None else len(sessions.admission))
    yield _gauge("kv_bytes", "Room for keys and values.", 0 if budget is None else budget.capacity_bytes)
    yield _gauge("kv_free_bytes", "Free room for new sessions.", 0 if budget is None else budget.bytes_left)
    yield _gauge(
        "kv_tokens", "Room for keys and values, in positions.", 0 if budget is None else budget.capacity_tokens
    )
    yield _gauge(
        "kv_free_tokens", "Free room for new sessions, in positions.", 0 if budget is None else budget.tokens_left
    )
    offload = KvOffload() if sessions is None else sessions.services.offload
    for name, text, sizes in (
        ("kv_offload_bytes", "Room for keys and values outside the KV cache.", offload.capacity_bytes),
        ("kv_offload_used_bytes", "Keys and values outside the KV cache.", offload.used_bytes),
    ):
        yield _gauge(name, text, [((place,), size_bytes) for place, size_bytes in sizes.items()], "place")


def _counter(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, value in {"": values}.items() if isinstance(values, int | float) else list(values.items()):
        family.add_metric([key] if label else [], value)
    return family


def _histogram(name: str, text: str, values: Mapping[str, Distribution], label: str = "") -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], list(value.cumulative()), value.total)
    return family


def _gauge(name: str, text: str, values: float | Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for key, value in [((), values)] if isinstance(values, int | float) else values:
        family.add_metric(key, value)
    return family
