"""Servers of one name end in one swarm, whatever hindered them at first: none forgets another that lives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm_protocol.process.local_registry import LocalRegistry
from tests.swarm.harness import records_through
from tests.swarm.network import ME, Network
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import wait_for

IS_SILENT = re.compile(
    r"no answer yet from …\w+(?:, …\w+)* of swarm default, though it seems to run; trying again for up to \d+ s"
)


@pytest.fixture
def start(llama, server_process) -> Iterator[Callable[..., ServerProcess]]:
    """Starts a server of the whole model; those that are frozen are woken in the end."""
    started: list[ServerProcess] = []

    def start(cache: Path, *arguments: str, wait: bool = True) -> ServerProcess:
        fixed = ("--model", str(llama), "--quant", "none", "--throughput", "1", "--blocks", "0:6")
        started.append(server_process(*fixed, *arguments, cache=cache, wait=wait))
        return started[-1]

    yield start
    for server in started:
        server.resume()


def peer_id(server: ServerProcess) -> str:
    return server.ready["peer"].rpartition("/p2p/")[2]


def registered(cache: Path, swarm: str = "default") -> set[str]:
    return {entry.peer_id for entry in LocalRegistry(swarm, cache / "swarm" / "swarms").servers()}


def seen_by_way_of(server: ServerProcess) -> set[str]:
    """Whom a client sees that comes through this server."""
    return {record.peer_id for record in records_through(server.ready["peer"], "default", "llama")}


def assert_one_swarm(*servers: ServerProcess) -> None:
    everybody = set(map(peer_id, servers))
    for server in servers:
        wait_for(lambda server=server: seen_by_way_of(server) == everybody, "all are seen through each of them")


@pytest.mark.slow
def test_who_starts_while_the_others_are_frozen_waits_for_them_and_says_so(tmp_path, start):
    server = start(tmp_path)
    server.freeze()
    newcomer = start(tmp_path, wait=False)
    wait_for(lambda: IS_SILENT.search(newcomer.stderr), "the newcomer says what it waits for")
    assert registered(tmp_path) == {peer_id(server)}
    server.resume()
    newcomer.wait_ready()
    assert_one_swarm(server, newcomer)
    assert registered(tmp_path) == {peer_id(server), peer_id(newcomer)}
    assert len(IS_SILENT.findall(newcomer.stderr)) == 1
    assert "starting without them" not in newcomer.stderr


@pytest.mark.slow
def test_a_container_that_shares_the_cache(tmp_path, start):
    """In a network of its own: servers for themselves alone cannot meet, and leave each other's entries alone."""
    with Network("container") as network:
        here = start(tmp_path)
        there = network.run("container", lambda: start(tmp_path))
        assert "cannot be reached from here: starting without them" in there.stderr
        assert registered(tmp_path) == {peer_id(here), peer_id(there)}
        open_here = start(tmp_path, "--host", network.addresses[ME])
        open_there = network.run("container", lambda: start(tmp_path, "--host", network.addresses["container"]))
        everybody = set(map(peer_id, (here, there, open_here, open_there)))
        assert registered(tmp_path) == everybody
        wait_for(lambda: seen_by_way_of(open_here) == everybody, "the two that reach each other bring all together")
        for server in (here, there, open_here, open_there):
            server.terminate()
        assert registered(tmp_path) == set()
