"""The map of a swarm."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from swarm_client.status import ModelStatus, as_json, show
from swarm_protocol.records import ServerRecord, ServerState, SwarmView
from swarm_protocol.span import Span


def server(
    name: str, start: int, end: int, state: ServerState = ServerState.ONLINE, num_blocks: int = 20
) -> ServerRecord:
    return ServerRecord(
        f"peer-{name}", (f"{name}:1",), "some-model", "r1", num_blocks, Span(start, end), state, tokens_per_s=7
    )


def shown(status: ModelStatus, width: int) -> list[str]:
    output = io.StringIO()
    show(Console(file=output, width=width), "home", [status])
    return [line.rstrip() for line in output.getvalue().splitlines()]


@pytest.fixture
def status() -> ModelStatus:
    servers = [server("aaaaaa", 0, 8), server("bbbbbb", 4, 12), server("cccccc", 12, 20, ServerState.JOINING)]
    return ModelStatus("some-model", 20, SwarmView.of(servers))


def test_map_shows_who_holds_what_and_what_is_missing(status):
    lines = shown(status, width=120)
    assert "home" in lines[0] and "some-model" in lines[0] and "20 blocks" in lines[0]
    (first,) = [line for line in lines if line.startswith("…aaaaaa")]
    assert "0:8" in first and "████████············" in first and "online" in first and "aaaaaa:1" in first
    (joining,) = [line for line in lines if line.startswith("…cccccc")]
    assert "············████████" in joining and "joining" in joining
    (replicas,) = [line for line in lines if line.startswith("replicas")]
    assert replicas.split()[1] == "1111" + "2222" + "1111" + "✗" * 8  # a joining server does not serve yet
    assert lines[-1].startswith("no server holds blocks 12:20")
    assert "python -m swarm_server --model some-model --swarm home" in lines[-1]


def test_narrow_terminals_and_long_models_share_columns(status):
    assert all(len(line) <= 80 for line in shown(status, width=80)[:-1])
    long = ModelStatus("some-model", 126, SwarmView.of([server("aaaaaa", 0, 125, num_blocks=126)]))
    (replicas,) = [line for line in shown(long, width=80) if line.startswith("replicas")]
    bar = replicas.split()[1]
    assert len(bar) < 126 and bar.endswith("✗") and bar.count("✗") == 1


def test_json_says_the_same(status):
    data = json.loads(json.dumps(as_json("home", [status])))
    (model,) = data["models"]
    assert data["swarm"] == "home" and model["model"] == "some-model" and model["num_blocks"] == 20
    assert model["replicas"] == [1] * 4 + [2] * 4 + [1] * 4 + [0] * 8
    assert model["missing"] == ["12:20"]
    assert [entry["blocks"] for entry in model["servers"]] == ["0:8", "4:12", "12:20"]
    assert [entry["state"] for entry in model["servers"]] == ["online", "online", "joining"]


def test_empty_swarm():
    output = io.StringIO()
    show(Console(file=output, width=80), "home", [])
    assert output.getvalue() == "swarm home has no servers\n"
