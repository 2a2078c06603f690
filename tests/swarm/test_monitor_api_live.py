"""``/api/v1`` over real servers that compute, are killed and are replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from swarm_client.core.config import ClientConfig
from swarm_gateway.history.store import HistoryStore
from swarm_gateway.monitor.monitor import Monitor
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.monitored_swarm import monitor_served
from tests.swarm import test_status_live
from tests.swarm.waiting import DEADLINE_S, wait_for

JSON = {"Accept": "application/json"}
servers = test_status_live.servers  # a fixture


@pytest.fixture
def api(servers, tmp_path) -> Iterator[httpx.Client]:
    servers.start("0:10", "10:20")
    config = ClientConfig(swarm=servers.swarm)
    monitor, history = Monitor(config), HistoryStore(tmp_path / "history.sqlite")
    with (
        monitor_served(monitor, history=history, config=config, own_model=DEFAULT_MODEL) as url,
        httpx.Client(base_url=f"{url}/api/v1", timeout=DEADLINE_S) as client,
    ):
        wait_for(lambda: client.get("/swarm").json()["servers"] == 2, "both servers are seen")
        yield client


def servers_of(api: httpx.Client) -> dict[str, dict[str, Any]]:
    return {server["peer_id"]: server for server in api.get("/servers").json()["servers"]}


@pytest.mark.promise("the monitor shows deaths and who joins as they happen")
def test_a_death_and_a_replacement_are_seen_as_they_happen(servers, api):
    assert api.get("/health").status_code == 200
    seen: list[str] = []

    def listen() -> None:
        with api.stream("GET", "/events") as answer:
            for line in answer.iter_lines():
                seen.append(line)
                if '"kind":"blocks_back"' in line:
                    return

    listening = threading.Thread(target=listen)
    listening.start()
    wait_for(lambda: "event: tick" in seen, "events are listened to")
    victim = servers.running[1]
    victim.kill()
    wait_for(lambda: servers_of(api)[victim.peer_id]["state"] == "unreachable", "the death is seen")
    health = api.get("/health")
    assert health.status_code == 503
    assert f"no server holds blocks 10:20 of model {DEFAULT_MODEL}" in health.json()["reasons"]
    servers.start("10:20")
    replacement = servers.running[-1]
    wait_for(lambda: api.get("/health").status_code == 200, "its blocks are served again")
    assert servers_of(api)[replacement.peer_id]["usable"]
    listening.join(DEADLINE_S)
    assert not listening.is_alive()
    events = api.get("/events", headers=JSON).json()["events"]
    of_victim = [event["kind"] for event in events if event["peer_id"] == victim.peer_id]
    assert of_victim[:1] == ["unreachable"]
    assert [event["kind"] for event in events if event["peer_id"] == replacement.peer_id][:1] == ["joined"]
    assert [event["blocks"] for event in events if event["kind"].startswith("blocks_")] == ["10:20", "10:20"]
    streamed = [line for line in seen if line.startswith("id: ")]
    known = [f"id: {event['id']}" for event in events]
    first = known.index(streamed[0])  # earlier ones may have been kept before anybody listened
    assert streamed == known[first : first + len(streamed)]
