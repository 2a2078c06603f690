"""Shows a swarm: its servers, their blocks, and the blocks that nobody serves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm_client.config import ClientConfig
from swarm_client.swarm import join_as_client
from swarm_protocol.default_model import DEFAULT_MODEL
from swarm_protocol.notes import DEFAULT_SWARM
from swarm_protocol.records import ServerRecord, ServerState, SwarmView, missing_spans

_MAX_MAP_WIDTH = 80  # characters; blocks of a longer model share them
_OTHER_COLUMNS_WIDTH = 58
_ADDRESS_WIDTH = 24
_STATE_STYLES = {ServerState.ONLINE: "green", ServerState.JOINING: "yellow", ServerState.DRAINING: "yellow"}


@dataclass(frozen=True)
class ModelStatus:
    """One model of a swarm."""

    model: str
    num_blocks: int
    view: SwarmView

    @property
    def replicas(self) -> list[int]:
        """For every block, how many online servers hold it."""
        return self.view.replicas(self.num_blocks)


async def read_status(config: ClientConfig, model: str | None = None) -> list[ModelStatus]:
    """All models of a swarm that have servers, or the one asked for; raises NoSwarm if nobody answers."""
    dht = await join_as_client(config)
    try:
        models = await dht.models()
        if model is not None:
            models = {model: models.get(model, 0)}
        found = [ModelStatus(name, num_blocks, await dht.view(name, num_blocks)) for name, num_blocks in models.items()]
    finally:
        await dht.shutdown()
    return [status for status in found if status.view.servers]


def as_json(swarm: str, models: list[ModelStatus]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "swarm": swarm,
        "models": [
            {
                "model": status.model,
                "num_blocks": status.num_blocks,
                "replicas": status.replicas,
                "missing": [str(span) for span in missing_spans(status.replicas)],
                "servers": [_server_json(server) for server in status.view.servers],
            }
            for status in models
        ],
    }


def show(console: Console, swarm: str, models: list[ModelStatus]) -> None:
    """Prints a map of blocks × servers for each model."""
    if not models:
        console.print(f"swarm {swarm} has no servers")
    for status in models:
        _show_model(console, swarm, status)


def _show_model(console: Console, swarm: str, status: ModelStatus) -> None:
    console.print(f"swarm [bold]{swarm}[/] · model [bold]{status.model}[/] · {status.num_blocks} blocks")
    columns = min(status.num_blocks, _MAX_MAP_WIDTH, max(10, console.width - _OTHER_COLUMNS_WIDTH))
    with_address = console.width >= _OTHER_COLUMNS_WIDTH + columns + _ADDRESS_WIDTH
    ruler = "0" + str(status.num_blocks).rjust(columns - 1)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("server", "blocks", ruler, "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "KV room"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("quant", no_wrap=True)
    if with_address:
        table.add_column("address", no_wrap=True)
    for server in status.view.servers:
        style = _STATE_STYLES.get(server.state, "")
        address = server.addresses[0] if server.addresses else "–"
        table.add_row(
            server.short_id,
            str(server.span),
            Text(_bar(server, status.num_blocks, columns), style=style),
            Text(server.state.name.lower(), style=style),
            f"{server.tokens_per_s:.0f}" if server.tokens_per_s else "–",
            f"{server.cache_tokens_left}",
            server.quant,
            *([address] if with_address else []),
        )
    table.add_row("replicas", "", _replica_bar(status.replicas, columns))
    console.print(table)
    missing = missing_spans(status.replicas)
    if missing:
        spans = ", ".join(str(span) for span in missing)
        model = "" if status.model == DEFAULT_MODEL else f" --model {status.model}"
        name = "" if swarm == DEFAULT_SWARM else f" --swarm {swarm}"
        console.print(
            f"[bold red]no server holds blocks {spans}[/]; to help: python -m swarm_server{model}{name}", soft_wrap=True
        )


def _blocks_of_column(column: int, columns: int, num_blocks: int) -> range:
    return range(column * num_blocks // columns, (column + 1) * num_blocks // columns)


def _bar(server: ServerRecord, num_blocks: int, columns: int) -> str:
    return "".join(
        "█" if any(block in server.span for block in _blocks_of_column(column, columns, num_blocks)) else "·"
        for column in range(columns)
    )


def _replica_bar(replicas: list[int], columns: int) -> Text:
    bar = Text()
    for column in range(columns):
        fewest = min(replicas[block] for block in _blocks_of_column(column, columns, len(replicas)))
        bar.append(str(min(fewest, 9)) if fewest else "✗", style="" if fewest else "bold red")
    return bar


def _server_json(server: ServerRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(server)
    fields["blocks"] = str(server.span)
    fields["state"] = server.state.name.lower()
    fields["tls_fingerprint"] = server.tls_fingerprint.hex()
    del fields["span"]
    return fields
