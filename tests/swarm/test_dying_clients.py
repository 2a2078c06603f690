"""Clients die: nothing of them stays on the servers."""

from __future__ import annotations

import os

from tests.marks import SLOW
from tests.swarm.lone_client import LoneClient
from tests.swarm.pair import random_ids
from tests.swarm.survival import ROOM, Fleet, room_left
from tests.swarm.waiting import wait_for

IDS = random_ids(1, 30, seed=40)


def num_open_files(fleet: Fleet) -> list[int]:
    """Of each server."""
    return [len(os.listdir(f"/proc/{server.pid}/fd")) for server in fleet.running]


@SLOW
def test_killed_in_the_middle_of_a_generation(fleet, cache_home):
    """Its sessions and their copies are gone, and so are its connections."""
    options = {"model": str(fleet.model), "swarm": fleet.swarm, "max_new_tokens": 50, "standby": True}
    with LoneClient(IDS, cache=cache_home, **options) as first, LoneClient(IDS, cache=cache_home, **options) as second:
        before = generate_and_die(first, fleet)  # the servers' connections to each other stay
        generate_and_die(second, fleet)
    wait_for(
        lambda: all(now <= then for now, then in zip(num_open_files(fleet), before, strict=True)),
        "no server has more open files than before",
    )


def generate_and_die(client: LoneClient, fleet: Fleet) -> list[int]:
    """Open files of the servers afterwards."""
    client.read(5)
    wait_for(lambda: all(room_left(server) < ROOM for server in fleet.running), "the session has copies")
    client.read(5)
    during = num_open_files(fleet)
    client.kill()
    fleet.wait_until_all_room_is_free()
    return wait_for(
        lambda: (after := num_open_files(fleet)) and sum(after) <= sum(during) - len(fleet.running) and after,
        "the connections are closed",
    )
