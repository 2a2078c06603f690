"""Servers of one name end in one swarm, whatever hindered them at first: none forgets another that lives."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_client import background
from swarm_protocol.dht import Dht
from swarm_protocol.identity import Identity
from swarm_protocol.notes import Notes
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

NUM_BLOCKS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    save_checkpoint("llama", directory)
    return directory


@pytest.fixture
def start(model, server_process) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server of the whole model; those that are frozen are woken in the end."""
    started: list[ServerProcess] = []

    def start(cache: Path, *arguments: str, wait: bool = True) -> ServerProcess:
        fixed = ("--model", str(model), "--quant", "none", "--throughput", "1", "--blocks", f"0:{NUM_BLOCKS}")
        started.append(server_process(*fixed, *arguments, cache=cache, wait=wait))
        return started[-1]

    yield start
    for server in started:
        os.kill(server.pid, signal.SIGCONT)  # not reaped yet: the pid is still its own


def begin(start: Callable[..., ServerProcess], *caches: Path) -> list[ServerProcess]:
    """Servers that start at once, and are ready."""
    servers = [start(cache, wait=False) for cache in caches]
    for server in servers:
        server.wait_ready()
    return servers


def peer_id(server: ServerProcess) -> str:
    return server.ready["peer"].rpartition("/p2p/")[2]


def noted(cache: Path, swarm: str = "default") -> set[str]:
    return {note.peer_id for note in Notes(swarm, cache / "swarm" / "swarms").servers()}


def seen_by_way_of(server: ServerProcess) -> set[str]:
    """Whom a client sees that comes through this server."""

    async def read() -> set[str]:
        dht = await Dht.join("default", [server.ready["peer"]], Identity.generate())
        try:
            return {record.peer_id for record in (await dht.view("llama", NUM_BLOCKS)).servers}
        finally:
            await dht.shutdown()

    return background.run(read())


def assert_one_swarm(*servers: ServerProcess) -> None:
    everybody = set(map(peer_id, servers))
    for server in servers:
        wait_for(lambda server=server: seen_by_way_of(server) == everybody, "all are seen through each of them")


def test_who_starts_while_the_others_are_frozen_joins_them_when_they_wake(tmp_path, start):
    """They stay frozen until the newcomer has given up waiting for them."""
    first, second = begin(start, tmp_path, tmp_path)
    for server in (first, second):
        os.kill(server.pid, signal.SIGSTOP)
    newcomer = start(tmp_path)
    everybody = set(map(peer_id, (first, second, newcomer)))
    assert noted(tmp_path) == everybody
    assert seen_by_way_of(newcomer) == {peer_id(newcomer)}
    for server in (first, second):
        os.kill(server.pid, signal.SIGCONT)
    assert_one_swarm(first, second, newcomer)
    assert noted(tmp_path) == everybody


def test_two_halves_that_learn_of_one_another_become_one(tmp_path, start):
    """Founded with caches of their own; then one note of one half lies in the cache of the other."""
    caches = tmp_path / "one", tmp_path / "two"
    for cache in caches:
        cache.mkdir()
    first, second, third = begin(start, caches[0], caches[0], caches[1])
    assert seen_by_way_of(first) == {peer_id(first), peer_id(second)}
    Notes("default", caches[0] / "swarm" / "swarms").write(peer_id(third), [third.ready["peer"]])
    assert_one_swarm(first, second, third)
