"""Servers that are told to leave: sessions move with their keys and values, or are waited for."""

from __future__ import annotations

import gc
import signal

import pytest
import torch

from swarm_cli.demo.local_cluster import LocalServer
from swarm_client import NoRoute
from tests.swarm.pair import random_ids
from tests.swarm.survival import Client, Fleet
from tests.swarm.waiting import wait_for

PROMPT = random_ids(1, 40, seed=20)
LINE = random_ids(1, 7, seed=21)


def wait_gone(server: LocalServer) -> None:
    wait_for(lambda: not server.alive, "the server has left by itself")
    assert "Traceback" not in server.stderr.read_text()


def assert_only_moved(client: Client, blocks: str) -> None:
    """Nothing was computed again."""
    assert client.recoveries == client.waits == []
    (move,) = client.moves
    assert str(move.span) == blocks and move.copied_tokens >= PROMPT.shape[1]


# ------------------------------------------------------------ there is another server


@pytest.mark.promise("a server that leaves hands its sessions over")
def test_a_generation_moves(client, moments):
    leavers = []

    def leave() -> None:
        leavers.append(client.server(1))
        leavers[0].signal(signal.SIGTERM)

    moments.before_step(5, leave)
    chat = client.generate(PROMPT, max_new_tokens=30)
    wait_gone(leavers[0])
    assert_only_moved(client, "2:4")
    client.generate(torch.cat([chat.sequences, LINE], 1), past_key_values=chat.past_key_values)
    assert_only_moved(client, "2:4")


# ------------------------------------------------------------ there is none


def lonely(fleet: Fleet, drain_timeout_s: float) -> LocalServer:
    """The only server of the middle blocks."""
    server = fleet.add("2:4", "--drain-timeout", str(drain_timeout_s))
    fleet.wait_ready(server)
    fleet.kill_replicas("2:4", but=server)
    return server


def test_it_waits_for_a_generation_and_takes_no_new_one(fleet, connect, moments):
    server = lonely(fleet, 100)
    client, other = connect(), connect(wait_timeout_s=0)
    other.wait_until_it_knows_all()
    other.generate(PROMPT)

    def leave() -> None:
        server.signal(signal.SIGTERM)
        wait_for(lambda: "leaving:" in server.stderr.read_text(), "the server has heard")
        with pytest.raises(NoRoute, match="no server holds blocks 2:4"):
            other.model.generate(PROMPT, max_new_tokens=2)

    moments.before_step(5 + 12, leave)
    client.generate(PROMPT)
    assert server.alive
    assert client.events == []
    gc.collect()  # the session ends with the last reference to it
    wait_gone(server)


def test_it_does_not_wait_for_ever(fleet, client):
    """The session goes on with whoever comes next."""
    server = lonely(fleet, 0.5)
    chat = client.generate(PROMPT)
    server.signal(signal.SIGTERM)
    wait_gone(server)
    client.listen(lambda _event: fleet.replicas("2:4") or fleet.add("2:4"))
    client.generate(torch.cat([chat.sequences, LINE], 1), past_key_values=chat.past_key_values)
    assert len(client.waits) == 1 and client.moved_blocks == ["2:4"]


def test_at_a_second_signal_it_leaves_at_once(fleet, client):
    server = lonely(fleet, 100)
    _chat = client.generate(PROMPT)
    server.signal(signal.SIGTERM)
    wait_for(lambda: "leaving:" in server.stderr.read_text(), "the server has heard")
    assert server.alive
    server.signal(signal.SIGINT)
    wait_gone(server)
