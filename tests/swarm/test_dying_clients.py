"""Clients die: nothing of them stays on the servers."""

from __future__ import annotations

import os

import psutil

from tests.swarm.pair import random_ids
from tests.swarm.processes import lone_client
from tests.swarm.survival import ROOM, Fleet, room_left
from tests.swarm.waiting import wait_for

IDS = random_ids(1, 30, seed=40)


def test_killed_in_the_middle_of_a_generation(fleet, cache_home):
    """Its sessions and their copies are gone, and so are its connections; those between servers may stay."""
    task = [str(fleet.model), {"swarm": fleet.swarm, "standby": True}, IDS[0].tolist(), 50, 5]
    client = lone_client(task, {**os.environ, "XDG_CACHE_HOME": str(cache_home)})
    try:
        assert all(client.stdout.readline() for _ in range(5))
        wait_for(lambda: all(room_left(server) < ROOM for server in fleet.running), "the session has copies")
        ports = {connection.laddr.port for connection in connections(client.pid)}
        assert num_connected(fleet, ports) >= len(fleet.running)
    finally:
        client.kill()
    fleet.wait_until_all_room_is_free()
    wait_for(lambda: num_connected(fleet, ports) == 0, "the connections are closed")


def num_connected(fleet: Fleet, ports: set[int]) -> int:
    """How many of the servers' connections lead to these ports."""
    return sum(connection.raddr.port in ports for server in fleet.running for connection in connections(server.pid))


def connections(pid: int) -> list:
    return [connection for connection in psutil.Process(pid).net_connections("tcp") if connection.raddr]
