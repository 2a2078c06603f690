"""Shows a swarm: its servers, their blocks, the chain a client would use, and the blocks that no server holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import isfinite
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import Monitor, SwarmSnapshot
from swarm_gateway.monitor.status_map import ON_CHAIN, ON_CHAIN_STYLE, blocks_table
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM
from swarm_protocol.wire.printable import printable


async def read_status(config: ClientConfig, model: str | None = None) -> SwarmSnapshot:
    """Return the state of all models that have servers, or of one; raise NoSwarm if no member can be asked."""
    monitor = Monitor(config, model)
    try:
        return await monitor.look()
    finally:
        await monitor.close()


def show(console: Console, swarm: str, snapshot: SwarmSnapshot, height: int | None = None) -> None:
    """Print a map of blocks × servers for each model. Lines of text are not broken, because users copy commands."""
    for part in picture(swarm, snapshot, console.width, height):
        console.print(part, soft_wrap=isinstance(part, Text))


def picture(swarm: str, snapshot: SwarmSnapshot, width: int, height: int | None = None) -> list[RenderableType]:
    """Return tables at most ``width`` wide, and text; ``height`` limits the number of servers."""
    notices = []
    if not snapshot.models:
        notices.append(Text(f"swarm {swarm} has no servers"))
        if snapshot.num_strangers:
            count = snapshot.num_strangers
            others = "1 server here is no member" if count == 1 else f"{count} servers here are no members"
            notices.append(
                Text(
                    f"{others} of the requested private swarm: is --swarm-key or --membership that of another swarm?",
                    "bold red",
                )
            )
    if snapshot.stale_s is not None:
        ago = f"{snapshot.stale_s:.0f} s ago"
        notices.append(Text(f"the DHT cannot be read at present; the servers shown were read {ago}", "bold red"))
    titles = [_title(swarm, status) for status in snapshot.models]
    remarks = [_remark(swarm, status) for status in snapshot.models]
    rows = [len(status.servers) for status in snapshot.models]
    if height is not None:
        tables = 2 * len(rows)  # lines of rulers and replicas
        # The terminal wraps long lines, so that they take several.
        texts = sum(-(-text.cell_len // width) for text in [*titles, *remarks, *notices])
        rows = _shares(rows, height - tables - texts)
    parts: list[RenderableType] = []
    for status, title, remark, count in zip(snapshot.models, titles, remarks, rows, strict=True):
        parts += [title, blocks_table(status, count, width)]
        if count < len(status.servers):
            parts.append(Text(f"… and {len(status.servers) - count} more", "dim"))
        parts.append(remark)
    return [*parts, *notices]


def _shares(wanted: Sequence[int], lines: int) -> list[int]:
    """Return how many servers of each model fit into the lines, with one line to mention the others."""
    shares = list(wanted)
    # The models with the fewest servers come first: the lines that they do not need are for the others.
    for done, model in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        fair = max(2, lines // (len(wanted) - done))
        if wanted[model] > fair:
            shares[model] = fair - 1
        lines -= min(wanted[model], fair)
    return shares


def _title(swarm: str, status: ModelStatus) -> Text:
    count, silent = len(status.servers), sum(not server.answers for server in status.servers)
    size = f" · {status.num_blocks} blocks · {count} {'server' if count == 1 else 'servers'}"
    title = Text.assemble("swarm ", (swarm, "bold"), " · model ", (printable(status.model), "bold"), size)
    return title.append(f", {silent} not answering", "red") if silent else title


def _remark(swarm: str, status: ModelStatus) -> Text:
    """Return the chain as text, or the reason why there is none, with advice."""
    if status.denied:
        spans = ", ".join(map(str, status.denied))
        why = next(server.denial for server in status.servers if server.denial)
        return Text(f"the servers of blocks {spans} do not let this client in: {printable(why)}", "bold red")
    if status.missing:
        spans = ", ".join(map(str, status.missing))
        model = "" if status.model == DEFAULT_MODEL else f" --model {printable(status.model)}"
        name = "" if swarm == DEFAULT_SWARM else f" --swarm {swarm}"
        command = f"; to help: {typed('server')}{model}{name}"
        return Text.assemble((f"no server holds blocks {spans}", "bold red"), command)
    if not status.chain:
        return Text(f"this client has no chain: {printable(status.no_chain) or 'it is looking for one'}", "bold red")
    hops = " → ".join(f"{hop.server.short_id} {hop.span}" for hop in status.chain)
    line = f" this client's chain: {hops}, about {status.tokens_per_s:.1f} tokens/s"
    return Text.assemble((ON_CHAIN, ON_CHAIN_STYLE), line)


def as_json(swarm: str, snapshot: SwarmSnapshot) -> dict[str, Any]:
    """Return the snapshot as JSON data for programs."""
    return {"swarm": swarm, "stale_s": snapshot.stale_s, "models": [_model_json(status) for status in snapshot.models]}


def _model_json(status: ModelStatus) -> dict[str, Any]:
    chain = [{"peer_id": hop.server.peer_id, "blocks": str(hop.span)} for hop in status.chain]
    return {
        "model": status.model,
        "revision": status.revision,
        "num_blocks": status.num_blocks,
        "replicas": status.replicas,
        "missing": [str(span) for span in status.missing],
        "denied": [str(span) for span in status.denied],
        "chain": chain or None,
        "tokens_per_s_estimate": status.tokens_per_s if chain else None,
        "servers": [_server_json(server) for server in status.servers],
    }


def _server_json(server: ServerStatus) -> dict[str, Any]:
    record = server.record
    fields = dataclasses.asdict(record)
    fields["blocks"] = str(record.span)
    fields["state"] = record.state.name.lower()
    fields["tls_fingerprint"] = record.tls_fingerprint.hex()
    fields["weights"] = record.weights.hex() or None
    fields["next_span"] = None if record.next_span is None else str(record.next_span)
    fields["expires_at"] = record.expires_at if isfinite(record.expires_at) else None
    fields["rtt_s"] = server.rtt_s
    fields["answers"] = server.answers
    fields["denial"] = server.denial or None
    fields["relay"] = server.relay_id or None
    del fields["span"], fields["token"]
    return fields
