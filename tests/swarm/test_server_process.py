"""``python -m swarm_server`` as a user starts and ends it: one line when ready, nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.dht.records import ServerRecord
from tests.swarm.harness import records_through
from tests.swarm.processes import ServerProcess
from tests.swarm.waiting import DEADLINE_S, wait_for

READY_LINE = re.compile(
    r"ready model=llama blocks=\d+:\d+ quant=none peer=/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+ grpc=127\.0\.0\.1:\d+ "
    r"products=(onednn|torch)"
)


class Machine:
    """One user's servers, which share a cache directory."""

    def __init__(self, model: Path, cache: Path, start: Callable[..., ServerProcess]) -> None:
        self.model, self._cache, self._start = model, cache, start

    def start(self, *arguments: str) -> ServerProcess:
        """Does not wait until the server is ready."""
        fixed = ("--model", str(self.model), "--quant", "none")
        return self._start(*fixed, *arguments, cache=self._cache, wait=False, is_fresh=True)

    def directory(self, swarm: str) -> Path:
        return self._cache / "swarm" / "swarms" / swarm

    def registry(self, swarm: str) -> dict[str, dict]:
        """What is registered of a swarm, by peer id."""
        return {path.stem: json.loads(path.read_text()) for path in self.directory(swarm).glob("*.json")}


@pytest.fixture
def machine(llama, tmp_path, server_process) -> Machine:
    return Machine(llama, tmp_path, server_process)


def records(server: ServerProcess, swarm: str = "default") -> list[ServerRecord]:
    return records_through(server.ready["peer"], swarm, "llama")


def peer_id(server: ServerProcess) -> str:
    return server.ready["peer"].rpartition("/p2p/")[2]


def assert_registered(machine: Machine, swarm: str, *servers: ServerProcess) -> None:
    """These servers and no others are."""
    registry = {peer_id: (entry["addresses"], entry["pid"]) for peer_id, entry in machine.registry(swarm).items()}
    assert registry == {peer_id(server): ([server.ready["peer"]], server.pid) for server in servers}


def test_servers_find_each_other_and_leave_without_trace(machine):
    """Two servers started at once without addresses, a third in a swarm of its own; each ends in another way."""
    first, second = machine.start("--blocks", "0:4"), machine.start("--blocks", "2:6", "--throughput", "123.5")
    third = machine.start("--swarm", "mine")
    for server in (first, second, third):
        server.wait_ready()
        (line,) = server.stdout
        assert READY_LINE.fullmatch(line)

    # They find each other through the registry, and only within their swarm.
    assert_registered(machine, "default", first, second)
    assert_registered(machine, "mine", third)
    default, mine = records(first), records(third, "mine")
    assert [record.peer_id for record in default] == [peer_id(first), peer_id(second)]
    assert [record.peer_id for record in mine] == [peer_id(third)]

    # What the ready line says is what the record says.
    for server, record in zip((first, second, third), default + mine, strict=True):
        assert server.ready == {
            "model": record.model,
            "blocks": str(record.span),
            "quant": record.quant,
            "peer": server.ready["peer"],
            "grpc": record.addresses[0],
            "products": server.ready["products"],
        }
        assert record.revision == ModelCheckpoint.open(machine.model).revision
        assert record.state.name == "ONLINE" and record.tokens_per_s > 0 and record.cache_tokens_left > 0
    assert default[1].tokens_per_s == 123.5
    assert str(mine[0].span) == "0:6"  # chosen: the whole model fits

    # SIGTERM and Ctrl-C withdraw the record. The libp2p daemon leaves with its server, whatever ended that.
    assert len(second.children()) == len(third.children()) == 1
    assert second.terminate() == 0
    assert [record.peer_id for record in records(first)] == [peer_id(first)]
    assert_registered(machine, "default", first)
    assert first.interrupt() == 0
    assert machine.registry("default") == {}
    assert third.kill() != 0
    assert all(len(server.stdout) == 1 for server in (first, second, third))
    assert all("Traceback" not in server.stderr for server in (first, second, third))


@pytest.mark.promise("a server whose terminal closes drains")
def test_a_closed_terminal_drains_a_server(cluster, cache_home):
    """It may say so more than once: that is no second signal."""
    server = cluster.start("--swarm", "hangup", "--num-blocks", "2")
    cluster.wait_ready([server])
    entry = cache_home / "swarm" / "swarms" / "hangup" / f"{server.peer_id}.json"
    assert entry.exists()
    for _ in range(3):
        server.signal(signal.SIGHUP)
    assert server.wait_gone(DEADLINE_S)
    assert not entry.exists()  # which only a server deletes that has left in order
    assert "Traceback" not in server.stderr.read_text()


@pytest.mark.slow
def test_a_signal_is_heard_before_the_server_is_ready(machine):
    """Here it waits for another server that is joining."""
    directory = machine.directory("default")
    directory.mkdir(parents=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = machine.start()
        wait_for(lambda: has_open(server.pid, directory / "lock"), "the server waits for the lock")
        assert server.terminate() == 0
    assert server.stdout == []
    assert "Traceback" not in server.stderr
    assert machine.registry("default") == {}


def has_open(pid: int, path: Path) -> bool:
    with suppress(FileNotFoundError):  # a file is closed at this moment
        return any(os.path.samefile(file, path) for file in Path(f"/proc/{pid}/fd").iterdir() if file.exists())
    return False


SERVER = ["--blocks", "0:2", "--quant", "none"]


def test_a_server_writes_lines_of_json(cluster):
    server = cluster.start(*SERVER, "--swarm", "json-logs", "--log-format", "json")
    cluster.wait_ready([server])
    server.signal(signal.SIGTERM)
    assert server.wait_gone(DEADLINE_S)
    lines = [json.loads(line) for line in server.stderr.read_text().splitlines()]
    (ready,) = [line for line in lines if line["message"] == "ready"]
    assert {name: ready[name] for name in server.ready} == server.ready  # as on stdout
    assert {"time", "level", "logger"} <= ready.keys() and len(lines) > 1
