"""`status` and `status --watch` of real servers that join and are killed."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.model_monitor import ModelStatus
from swarm_gateway.monitor.status import read_status
from tests.swarm.processes import all_processes, is_alive, parent_of
from tests.swarm.waiting import DEADLINE_S, wait_for

_numbers = itertools.count()
_HOME = "\x1b[H"  # a picture begins
_LEAVE = "\x1b[?1049l"  # what the terminal showed before is back
_FOOTER = "Ctrl-C ends it"
_IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


class Servers:
    """A swarm of processes that can be killed."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.swarm = f"status-{os.getpid()}-{next(_numbers)}"
        self._cluster = cluster
        self.running: list[LocalServer] = []

    def start(self, *spans: str) -> None:
        servers = [self._cluster.start("--blocks", blocks, "--swarm", self.swarm) for blocks in spans]
        self.running += servers
        self._cluster.wait_ready(servers)

    def kill(self, peer_id: str) -> None:
        (server,) = [server for server in self.running if server.peer_id == peer_id]
        server.kill()
        assert server.wait_gone(DEADLINE_S)

    def status(self) -> ModelStatus:
        """What one look shows."""
        (model,) = background.run(read_status(ClientConfig(swarm=self.swarm))).models
        return model


@pytest.fixture
def servers(cluster) -> Iterator[Servers]:
    servers = Servers(cluster)
    yield servers
    for server in servers.running:
        server.kill()


class Watching:
    """``python -m swarm_client status --watch`` under way, in a terminal or in a pipe."""

    def __init__(self, servers: Servers, *options: str, terminal: bool = False) -> None:
        command = [sys.executable, "-m", "swarm_client", "status", "--swarm", servers.swarm, "--watch", "0.5", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command] if terminal else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
        )
        self._data = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return self._data.decode(errors="ignore")

    def wait_for(self, what: str, condition: Callable[[str], object]) -> str:
        """What the terminal shows once the condition holds for it."""

        def shown() -> str | None:
            assert self.process.poll() is None, (self.output, self.process.stderr.read())
            whole = [frame for frame in self.output.split(_HOME) if _FOOTER in frame]
            return plain(whole[-1]) if whole and condition(plain(whole[-1])) else None

        return wait_for(shown, what)

    def ended(self) -> tuple[int, str]:
        """The exit code and what stderr says."""
        code = self.process.wait(DEADLINE_S)
        self._reader.join()
        return code, self.process.stderr.read().decode()

    def _read(self) -> None:
        while data := os.read(self.process.stdout.fileno(), 65536):
            self._data += data


@pytest.fixture
def watch(servers) -> Iterator[Callable[..., Watching]]:
    started: list[Watching] = []

    def start(*options: str, terminal: bool = False) -> Watching:
        started.append(Watching(servers, *options, terminal=terminal))
        return started[-1]

    yield start
    for watching in started:
        watching.process.kill()
        watching.process.wait()
        for pipe in (watching.process.stdin, watching.process.stdout, watching.process.stderr):
            pipe.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def rows(picture: str) -> list[str]:
    return [line for line in picture.splitlines() if line.startswith("…") and "…" not in line[1:]]


def chain(status: ModelStatus) -> dict[str, str]:
    return {str(hop.span): hop.server.peer_id for hop in status.chain}


@pytest.mark.promise("swarm status shows who holds what, who does not answer, and the chain")
def test_a_server_that_was_killed_does_not_answer_and_the_chain_avoids_it(servers):
    servers.start("0:10", "10:20", "10:20")
    before = servers.status()
    assert before.replicas == [1] * 10 + [2] * 10
    assert all(server.answers and server.rtt_s is not None for server in before.servers)
    assert before.tokens_per_s > 0
    victim = chain(before)["10:20"]
    servers.kill(victim)
    after = servers.status()
    assert [server.record.peer_id for server in after.servers if not server.answers] == [victim]
    assert after.replicas == [1] * 20
    assert chain(after)["10:20"] not in (victim, None)
    servers.kill(chain(after)["10:20"])
    last = servers.status()
    assert [str(span) for span in last.missing] == ["10:20"] and last.chain == ()


@pytest.mark.promise("the monitor shows deaths and who joins as they happen")
def test_watching_in_a_terminal_shows_who_joins_and_who_dies_until_ctrl_c(servers, watch):
    servers.start("0:10")
    watching = watch(terminal=True)
    first = watching.wait_for("one server is shown", lambda picture: len(rows(picture)) == 1)
    assert "no server holds blocks 10:20; to help: python -m swarm_server" in first
    servers.start("10:20")
    watching.wait_for("the chain goes through the new server", lambda picture: picture.count("0 → …") == 1)
    servers.kill(servers.running[1].peer_id)
    watching.wait_for("it does not answer", lambda picture: "not answering" in "".join(rows(picture)))
    watching.process.stdin.write(b"\x03")
    watching.process.stdin.flush()
    code, errors = watching.ended()
    assert (code, errors) == (0, "")
    left = plain(watching.output.rpartition(_LEAVE)[2])  # on the screen
    assert len(rows(left)) == 2 and "no server holds blocks 10:20" in left and _FOOTER not in left


@pytest.mark.parametrize(
    ("options", "text"), [([], "this client's chain: "), (["--json"], '"blocks": "0:20"')], ids=["text", "json"]
)
def test_watching_in_a_pipe_prints_one_picture_after_the_other_until_a_signal(servers, watch, options, text):
    servers.start("0:20")
    watching = watch(*options)
    wait_for(lambda: watching.output.count(text) >= 2, "two pictures were printed")
    watching.process.send_signal(signal.SIGTERM)
    assert watching.ended() == (128 + signal.SIGTERM, "")
    assert "\x1b" not in watching.output


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_watching(servers, watch):
    servers.start("0:20")
    watching = watch(terminal=True)
    watching.wait_for("a server is shown", lambda picture: len(rows(picture)) == 1)
    (terminal,) = [pid for pid in all_processes() if parent_of(pid) == watching.process.pid]
    daemons = [pid for pid in all_processes() if parent_of(pid) == terminal]
    assert daemons
    watching.process.kill()  # it held the terminal open
    wait_for(lambda: not any(map(is_alive, [terminal, *daemons])), "the client and its libp2p daemon have ended")
