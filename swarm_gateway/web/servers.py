"""The servers that compute an answer, and their events, as an extension of OpenAI's chunks."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from swarm_client.batching.request import Servers
from swarm_client.core.events import Event
from swarm_client.routing.routing import Hop
from swarm_protocol.span import Span
from swarm_protocol.wire.printable import printable


def described(what: Servers | Event) -> dict[str, Any]:
    """Return ``{"servers": […]}``, one per hop, or ``{"event": {"type": …, "text": …, …}}`` with the event's fields."""
    if isinstance(what, Servers):
        return {"servers": [_server(hop) for hop in what.hops]}
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(what).__name__).lower()
    values = {field.name: _plain(getattr(what, field.name)) for field in fields(what)}
    return {"event": {"type": kind, "text": printable(str(what)), **values}}


def _server(hop: Hop) -> dict[str, Any]:
    server = hop.server
    return {
        "peer_id": printable(server.peer_id),
        "span": _plain(hop.span),
        "num_blocks": server.num_blocks,
        "device": server.device,
        "quant": server.quant,
        "address": printable(server.addresses[0]) if server.addresses else None,
        "version": printable(server.software_version),
    }


def _plain(value: Any) -> Any:
    return [value.start, value.end] if isinstance(value, Span) else value
