"""The map of one model: a table of servers × blocks that fits the terminal, readable without colours too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.table import Table
from rich.text import Text

from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_protocol.dht.records import ServerRecord, ServerState, short_id
from swarm_protocol.wire.constants import WIRE_VERSION
from swarm_protocol.wire.printable import printable

ON_CHAIN, HOSTED, SILENT, ELSEWHERE = "█▒░·"
ON_CHAIN_STYLE = "bold green"
_GAP = 2  # characters between columns
_MAX_WIDTH = 80  # largest width of the map; blocks of a longer model share characters
_MIN_WIDTH, _GOOD_WIDTH = 16, 40  # the map may become narrower to show numbers than for other columns
_STATE_STYLES = {ServerState.ONLINE: "green", ServerState.JOINING: "yellow", ServerState.DRAINING: "yellow"}
_UNKNOWN, _REPLICAS = "–", "replicas"


def blocks_table(status: ModelStatus, rows: int, width: int) -> Table:
    """Return a table of at most ``rows`` servers, ordered by blocks. If not all fit, the chain's servers come first."""
    on_chain: dict[str, set[int]] = {}
    for hop in status.chain:
        on_chain.setdefault(hop.server.peer_id, set()).update(hop.span)
    servers = status.servers
    if rows < len(servers):
        servers = tuple(sorted(servers, key=lambda server: server.record.peer_id not in on_chain)[:rows])
    columns, map_width = _fitting(status, servers, width)
    ruler = "0" + str(status.num_blocks).rjust(map_width - 1)
    columns.insert(2, _Column(ruler, [""] * len(servers)))  # the map, behind the servers and their blocks
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in columns:
        table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=True)
    for index, server in enumerate(servers):
        can_be_used = server.answers and not server.denial
        style = _STATE_STYLES.get(server.record.state, "") if can_be_used else "red"
        cells = [Text(column.cells[index]) for column in columns]
        cells[2] = _bar(server, on_chain.get(server.record.peer_id, ()), status.num_blocks, map_width, style)
        cells[3].stylize(style)
        table.add_row(*cells, style="" if server.answers else "dim")
    table.add_row(_REPLICAS, "", _replica_bar(status.replicas, map_width))
    return table


@dataclass(frozen=True)
class _Column:
    """A column of the table. Columns with the highest ``rank`` are left out first; those with rank 0 never are."""

    heading: str
    cells: Sequence[str]
    rank: int = 0
    is_number: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (self.heading, *self.cells))) + _GAP


def _all_columns(status: ModelStatus, servers: Sequence[ServerStatus]) -> list[_Column]:
    records = [server.record for server in servers]
    return [
        _Column("server", [*(record.short_id for record in records), _REPLICAS]),
        _Column("blocks", [str(record.span) for record in records]),
        _Column("state", [_state(status, server) for server in servers]),
        _Column("tokens/s", [_speed(record) for record in records], 4, True),
        _Column("load", [_load(server) for server in servers], 2, True),
        _Column("KV room", [_room(server) for server in servers], 3, True),
        _Column("RTT", [_rtt(server) for server in servers], 1, True),
        _Column("reached", [_way(server) for server in servers], 7),
        _Column("quant", [_quant(record) for record in records], 5),
        _Column("address", [_address(record) for record in records], 6),
    ]


def _fitting(status: ModelStatus, servers: Sequence[ServerStatus], width: int) -> tuple[list[_Column], int]:
    """Return the columns that fit beside the map, and the map's width."""
    columns = _all_columns(status, servers)
    if not any(server.relay_id for server in servers):
        columns = [column for column in columns if column.heading != "reached"]
    left = width
    for column in sorted(columns, key=lambda column: column.rank):
        least = min(status.num_blocks, _MIN_WIDTH if column.is_number else _GOOD_WIDTH)
        if column.rank and left - column.width < least:  # then no column of a higher rank is shown either
            columns = [shown for shown in columns if shown.rank < column.rank]
            break
        left -= column.width
    return columns, max(1, min(status.num_blocks, _MAX_WIDTH, left))


def _state(status: ModelStatus, server: ServerStatus) -> str:
    record = server.record
    if not server.answers:
        return "not answering"
    if server.denial:
        return "access denied"
    if record.wire_version != WIRE_VERSION:
        return f"wire version {record.wire_version}"
    if status.revision not in ("", record.revision):
        return "other revision"
    if record.next_span is not None:
        return f"moving to {record.next_span}"
    return record.state.name.lower()


def _speed(record: ServerRecord) -> str:
    return f"{record.tokens_per_s:.0f}" if record.tokens_per_s else _UNKNOWN


def _quant(record: ServerRecord) -> str:
    """Return the quantisation, and the number of the group's members if there are several."""
    return printable(record.quant) + (f" ×{record.members}" if record.members > 1 else "")


def _address(record: ServerRecord) -> str:
    return printable(record.addresses[0]) if record.addresses else _UNKNOWN


def _room(server: ServerStatus) -> str:
    return str(server.record.cache_tokens_left) if server.answers else _UNKNOWN


def _load(server: ServerStatus) -> str:
    return f"{server.record.queue_delay_s * 1e3:.0f} ms" if server.answers else _UNKNOWN


def _way(server: ServerStatus) -> str:
    if not server.answers:
        return _UNKNOWN
    return f"via {short_id(server.relay_id)}" if server.relay_id else "directly"


def _rtt(server: ServerStatus) -> str:
    if server.rtt_s is None:
        return _UNKNOWN
    return f"{server.rtt_s * 1e3:.0f} ms" if server.rtt_s >= 1e-3 else "<1 ms"  # the loop's clock is no more precise


def _blocks_of_column(column: int, columns: int, num_blocks: int) -> range:
    return range(column * num_blocks // columns, (column + 1) * num_blocks // columns)


def _bar(server: ServerStatus, on_chain: Collection[int], num_blocks: int, columns: int, style: str) -> Text:
    characters = []
    for column in range(columns):
        blocks = _blocks_of_column(column, columns, num_blocks)
        if any(block in on_chain for block in blocks):
            characters.append((ON_CHAIN, ON_CHAIN_STYLE))
        elif any(block in server.record.span for block in blocks):
            characters.append((HOSTED if server.answers and not server.denial else SILENT, style))
        else:
            characters.append((ELSEWHERE, "dim"))
    return _joined(characters)


def _replica_bar(replicas: Sequence[int], columns: int) -> Text:
    fewest = [min(replicas[block] for block in _blocks_of_column(i, columns, len(replicas))) for i in range(columns)]
    return _joined([(str(min(count, 9)), "") if count else ("✗", "bold red") for count in fewest])


def _joined(characters: Sequence[tuple[str, str]]) -> Text:
    """Return the characters as text, with one span for each run of the same style."""
    runs = groupby(characters, key=lambda character: character[1])
    return Text.assemble(*(("".join(symbol for symbol, _ in run), style) for style, run in runs))
