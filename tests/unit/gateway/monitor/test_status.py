"""The picture of a swarm, and the same for programs."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console, Group

from swarm_client.routing.routing import Hop
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import SwarmSnapshot
from swarm_gateway.monitor.status import as_json, picture, show
from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import WIRE_VERSION

JOINING, DRAINING = ServerState.JOINING, ServerState.DRAINING


def server(
    name: str, blocks: str, rtt_s: float | None = 0.0042, answers: bool = True, **fields: object
) -> ServerStatus:
    known = {"num_blocks": 20, "tokens_per_s": 7, "queue_delay_s": 0.012, "cache_tokens_left": 2048}
    known |= {"addresses": (f"{name}:1",), "span": Span.parse(blocks)}
    record = ServerRecord(peer_id=f"peer-{name}", model="some-model", revision="r1", **(known | fields))
    return ServerStatus(record, rtt_s if answers else None, answers)


def model(*servers: ServerStatus, chain: dict[str, str] | None = None, num_blocks: int = 20) -> ModelStatus:
    """With a chain of the servers of these names."""
    status = ModelStatus("some-model", num_blocks, servers, "r1")
    if chain is None:
        return status
    records = {server.record.peer_id: server.record for server in servers}
    hops = tuple(Hop(records[f"peer-{name}"], Span.parse(blocks)) for name, blocks in chain.items())
    return dataclasses.replace(status, chain=hops, tokens_per_s=12.345)


def shown(status: ModelStatus, width: int, **snapshot: float) -> list[str]:
    output = io.StringIO()
    show(Console(file=output, width=width), "home", SwarmSnapshot((status,), **snapshot))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def screen(models: list[ModelStatus], width: int, height: int) -> list[str]:
    """What a terminal shows."""
    output = io.StringIO()
    Console(file=output, width=width).print(Group(*picture("home", SwarmSnapshot(tuple(models)), width, height)))
    return [line.rstrip() for line in output.getvalue().splitlines()]


def line_of(lines: list[str], beginning: str) -> str:
    (line,) = [line for line in lines if line.startswith(beginning)]
    return line


@pytest.fixture
def private() -> ModelStatus:
    """Of a swarm that this client is no member of."""
    why = "members only:\x1b[2J ask"
    servers = server("aaaaaa", "0:8"), server("bbbbbb", "4:16")
    return model(*(dataclasses.replace(one, denial=why) for one in servers), server("cccccc", "0:2"))


def test_servers_that_do_not_let_this_client_in(private):
    lines = shown(private, width=140)
    assert lines[0] == "swarm home · model some-model · 20 blocks · 3 servers"
    assert line_of(lines, "…aaaaaa").split()[2:5] == ["░" * 8 + "·" * 12, "access", "denied"]
    assert lines[-1] == r"the servers of blocks 2:16 do not let this client in: members only:\x1b[2J ask"
    found = as_json("home", SwarmSnapshot((private,)))["models"][0]
    assert (found["denied"], found["missing"]) == (["2:16"], ["16:20"])
    assert [one["denial"] for one in found["servers"]] == [private.servers[0].denial] * 2 + [None]


def test_a_private_swarm_of_which_nobody_is_there():
    output = io.StringIO()
    show(Console(file=output, width=200), "home", SwarmSnapshot((), num_strangers=3))
    assert output.getvalue().splitlines() == [
        "swarm home has no servers",
        "3 servers here are no members of the requested private swarm: "
        "is --swarm-key or --membership that of another swarm?",
    ]


@pytest.fixture
def gap() -> ModelStatus:
    return model(server("aaaaaa", "0:8"), server("bbbbbb", "4:12"), server("cccccc", "12:20", state=JOINING))


@pytest.fixture
def whole() -> ModelStatus:
    servers = server("aaaaaa", "0:8"), server("bbbbbb", "4:14"), server("cccccc", "12:20")
    return model(*servers, chain={"aaaaaa": "0:8", "bbbbbb": "8:12", "cccccc": "12:20"})


def test_map_shows_who_holds_what_and_what_is_missing(gap):
    lines = shown(gap, width=140)
    assert lines[0] == "swarm home · model some-model · 20 blocks · 3 servers"
    first, numbers = line_of(lines, "…aaaaaa").split(), ["7", "12", "ms", "2048", "4", "ms"]
    assert first == ["…aaaaaa", "0:8", "▒" * 8 + "·" * 12, "online", *numbers, "none", "aaaaaa:1"]
    assert line_of(lines, "…cccccc").split()[2:4] == ["·" * 12 + "▒" * 8, "joining"]
    assert line_of(lines, "replicas").split()[1] == "1111" + "2222" + "1111" + "✗" * 8  # who joins does not serve yet
    help_line = "no server holds blocks 12:20; to help: python -m swarm_server --model some-model --swarm home"
    assert lines[-1] == help_line
    assert shown(gap, width=60)[-1] == help_line  # to copy, in one piece


def test_chain_stands_out_without_colours(whole):
    lines = shown(whole, width=100)
    assert line_of(lines, "…aaaaaa").split()[2] == "████████············"
    assert line_of(lines, "…bbbbbb").split()[2] == "····▒▒▒▒████▒▒······"
    assert line_of(lines, "…cccccc").split()[2] == "············████████"
    chain = "…aaaaaa 0:8 → …bbbbbb 8:12 → …cccccc 12:20"
    assert lines[-1] == f"█ this client's chain: {chain}, about 12.3 tokens/s"


def test_what_does_not_answer_is_marked_and_does_not_count():
    lines = shown(model(server("aaaaaa", "0:20"), server("bbbbbb", "10:20", answers=False)), width=100)
    assert lines[0].endswith("· 2 servers, 1 not answering")
    ghost = line_of(lines, "…bbbbbb").split()
    assert ghost[2:] == ["·" * 10 + "░" * 10, "not", "answering", "7", "–", "–", "–", "none"]
    assert line_of(lines, "replicas").split()[1] == "1" * 20


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": DRAINING, "next_span": Span(3, 15)}, "moving to 3:15"),
        ({"state": DRAINING}, "draining"),
        ({"state": JOINING}, "joining"),
        ({"revision": "r2"}, "other revision"),
        ({"wire_version": WIRE_VERSION + 1}, f"wire version {WIRE_VERSION + 1}"),
    ],
)
def test_a_server_that_cannot_be_used_says_why(fields, words):
    other = server("bbbbbb", "0:20")
    other = dataclasses.replace(other, record=dataclasses.replace(other.record, **fields))
    status = model(server("aaaaaa", "0:20"), other)
    lines = shown(status, width=100)
    assert f"  {words}  " in line_of(lines, "…bbbbbb")
    assert status.replicas == [1] * 20


def test_a_client_without_a_chain_says_why(whole):
    assert shown(dataclasses.replace(whole, chain=(), no_chain="why"), 80)[-1] == "this client has no chain: why"


def test_unknown_round_trips():
    assert line_of(shown(model(server("aaaaaa", "0:20", rtt_s=None)), 80), "…aaaaaa").split()[-1] == "–"
    assert "  <1 ms" in line_of(shown(model(server("aaaaaa", "0:20", rtt_s=0.0)), 80), "…aaaaaa")
    assert "  120 ms" in line_of(shown(model(server("aaaaaa", "0:20", rtt_s=0.12)), 80), "…aaaaaa")


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (40, ["state"]),
        (60, ["state", "load", "RTT"]),
        (80, ["state", "tokens/s", "load", "KV", "room", "RTT"]),
        (90, ["state", "tokens/s", "load", "KV", "room", "RTT", "quant"]),
        (140, ["state", "tokens/s", "load", "KV", "room", "RTT", "quant", "address"]),
    ],
)
def test_narrow_terminals_show_less_and_nothing_is_broken(whole, width, headings):
    lines = shown(whole, width)
    ruler = line_of(lines, "server").split()
    assert ruler[4:] == headings and ruler[:3] == ["server", "blocks", "0"]
    assert all(len(line) <= width for line in lines[1:-1])
    assert len(lines) == 1 + 1 + 3 + 1 + 1  # title, ruler, servers, replicas, chain


@pytest.mark.parametrize("width", [60, 80, 140])
def test_blocks_of_deep_models_share_columns(width):
    deep = model(server("aaaaaa", "0:125", num_blocks=126), num_blocks=126)
    lines = shown(deep, width)
    bar = line_of(lines, "replicas").split()[1]
    assert 16 <= len(bar) <= 80 and bar == "1" * (len(bar) - 1) + "✗"
    assert all(len(line) <= width for line in lines[:-1])


def test_a_group_is_seen():
    lines = shown(model(server("aaaaaa", "0:10", quant="int8", members=2), server("bbbbbb", "10:20")), width=140)
    assert "int8 ×2" in line_of(lines, "…aaaaaa") and "×" not in line_of(lines, "…bbbbbb")


def test_strangers_do_not_steer_the_terminal():
    evil = model(server("aaaaaa", "0:10", quant="\x1b[2J", addresses=("\r\x07",)))
    lines = shown(dataclasses.replace(evil, model="\x1b]0;title\x07"), width=140)
    assert not set("\x1b\x07\r") & set("".join(lines)) and r"\x1b[2J" in line_of(lines, "…aaaaaa")


def crowd(count: int, name: str = "x") -> ModelStatus:
    """Servers of all blocks; the chain is the last."""
    servers = [server(f"{name}{number:05}", "0:20") for number in range(count)]
    return model(*servers, chain={f"{name}{count - 1:05}": "0:20"})


def test_more_servers_than_lines():
    lines = screen([crowd(1000)], width=80, height=24)
    assert len(lines) == 24
    assert lines[2].startswith("…x00999") and "█" * 20 in lines[2]  # the chain first
    assert [line[:7] for line in lines[3:21]] == [f"…x{number:05}" for number in range(18)]
    assert lines[21].startswith("replicas") and lines[22] == "… and 981 more"
    assert lines[23].startswith("█ this client's chain: …x00999 0:20")


def test_as_many_servers_as_lines():
    lines = screen([crowd(20)], width=80, height=24)
    assert len(lines) == 24 and not any("more" in line for line in lines)
    assert lines[2].startswith("…x00000")  # by their blocks


def test_models_share_the_lines():
    lines = screen([crowd(100, "a"), crowd(2, "b"), crowd(100, "c")], width=80, height=40)
    assert len(lines) == 40
    assert sum(line.startswith("…b") for line in lines) == 2
    assert {sum(line.startswith(f"…{name}0") for line in lines) for name in "ac"} == {12}


def test_a_dht_that_cannot_be_read_is_mentioned(whole):
    note = "the DHT cannot be read at present; the servers shown were read 14 s ago"
    assert shown(whole, 100, stale_s=14.2) == [*shown(whole, 100), note]


def test_json_says_the_same(gap):
    data = json.loads(json.dumps(as_json("home", SwarmSnapshot((gap,)))))
    (entry,) = data["models"]
    assert data["swarm"] == "home" and entry["model"] == "some-model" and entry["num_blocks"] == 20
    assert entry["replicas"] == [1] * 4 + [2] * 4 + [1] * 4 + [0] * 8
    assert entry["missing"] == ["12:20"]
    assert entry["chain"] is None and entry["tokens_per_s_estimate"] is None
    assert [server["blocks"] for server in entry["servers"]] == ["0:8", "4:12", "12:20"]
    assert [server["state"] for server in entry["servers"]] == ["online", "online", "joining"]


def test_json_of_chain_and_round_trips():
    moving = server("bbbbbb", "0:9", rtt_s=None, state=DRAINING, next_span=Span(3, 15), expires_at=math.inf)
    status = model(server("aaaaaa", "0:20"), moving, server("cccccc", "0:20", answers=False), chain={"aaaaaa": "0:20"})
    (entry,) = json.loads(json.dumps(as_json("home", SwarmSnapshot((status,))), allow_nan=False))["models"]
    assert entry["chain"] == [{"peer_id": "peer-aaaaaa", "blocks": "0:20"}]
    assert entry["tokens_per_s_estimate"] == 12.345
    assert [server["rtt_s"] for server in entry["servers"]] == [0.0042, None, None]
    assert [server["answers"] for server in entry["servers"]] == [True, True, False]
    assert [server["next_span"] for server in entry["servers"]] == [None, "3:15", None]


def test_how_each_server_is_reached_is_shown_where_one_is_relayed():
    direct, relayed = server("aaaaaa", "0:20"), dataclasses.replace(server("bbbbbb", "0:20"), relay_id="relay-cccccc")
    assert not any("directly" in line for line in shown(model(direct), 200))
    both = shown(model(direct, relayed), 200)
    assert "directly" in line_of(both, "…aaaaaa")
    assert "via …cccccc" in line_of(both, "…bbbbbb")
