"""Child processes that end together: with small commands instead of servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from swarm_cli.up.supervisor import ChildProcess, Supervisor
from swarm_protocol.errors import SwarmError
from tests.swarm.waiting import wait_for

# Says that it is ready; notes that it was asked to end.
OBEDIENT = """
import signal, sys, time
def leave(*_):
    open(sys.argv[1], "a").write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("a warning", flush=True)
print("ready now", flush=True)
print("more", flush=True)
while True:
    time.sleep(60)
"""
DEAF = OBEDIENT.replace("signal.signal(signal.SIGTERM, leave)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
# A parent of an obedient child, which is killed.
KILLED = """
import os, signal, sys
from swarm_cli.up.supervisor import ChildProcess, Supervisor
from tests.unit.cli.up.test_supervisor import OBEDIENT
child = ChildProcess("child", [sys.executable, "-c", OBEDIENT, *sys.argv[1:]], 60.0)
Supervisor().wait_for(lambda: child.line("ready"))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def start(tmp_path) -> Callable[..., ChildProcess]:
    def start(name: str, script: str = OBEDIENT, leave_s: float = 60.0) -> ChildProcess:
        return ChildProcess(name, [sys.executable, "-c", script, str(tmp_path / "ended"), name], leave_s)

    return start


def test_children_get_ready_and_end_in_order(start, tmp_path) -> None:
    with Supervisor() as supervisor:
        for name in ("first", "second"):
            child = supervisor.add(start(name))
            assert supervisor.wait_for(lambda child=child: child.line("ready")) == "ready now" and child.code is None
    assert (tmp_path / "ended").read_text().split() == ["second", "first"]


def test_a_child_that_is_killed_is_named_and_the_others_end(start, tmp_path) -> None:
    sentence = r"^the second was killed by SIGKILL; the first had to end, too$"
    with pytest.raises(SwarmError, match=sentence), Supervisor() as supervisor:
        first, second = supervisor.add(start("first")), supervisor.add(start("second"))
        supervisor.wait_for(lambda: first.line("ready") and second.line("ready"))
        second.kill()
        supervisor.wait_for(lambda: None)
    assert (tmp_path / "ended").read_text().split() == ["first"]


def test_a_child_that_does_not_end_is_killed(start) -> None:
    with Supervisor() as supervisor:
        child = supervisor.add(start("deaf", DEAF, 0.0))
        supervisor.wait_for(lambda: child.line("ready"))
    assert child.code == -signal.SIGKILL


def test_another_signal_kills_all(start) -> None:
    with pytest.raises(KeyboardInterrupt), Supervisor() as supervisor:
        first = supervisor.add(start("first", DEAF))
        supervisor.wait_for(lambda: first.line("ready"))

        class Interrupted(ChildProcess):
            def end(self) -> None:
                raise KeyboardInterrupt

        second = supervisor.add(Interrupted("second", [sys.executable, "-c", DEAF], 60.0))
    assert (first.code, second.code) == (-signal.SIGKILL, -signal.SIGKILL)


def test_ctrl_c_of_the_terminal_does_not_reach_children(start) -> None:
    with Supervisor() as supervisor:
        child = supervisor.add(start("child"))
        supervisor.wait_for(lambda: child.line("ready"))
        assert os.getpgid(child._process.pid) == child._process.pid != os.getpgrp()


def test_children_end_with_a_supervisor_that_is_killed(tmp_path) -> None:
    ended = tmp_path / "ended"
    parent = subprocess.run([sys.executable, "-c", KILLED, str(ended), "child"])
    assert parent.returncode == -signal.SIGKILL
    assert wait_for(lambda: ended.exists() and ended.read_text(), "the child was asked to end") == "child\n"


def test_log_lines_of_a_relayed_child_take_the_place_of_a_live_line(start, monkeypatch, capsys) -> None:
    monkeypatch.setattr("swarm_cli.up.supervisor.shows_progress", lambda: True)
    monkeypatch.setattr("swarm_cli.up.supervisor.is_in_foreground", lambda: False)
    script = "import sys; print('ready'); print('a log line', file=sys.stderr)"
    with Supervisor() as supervisor:
        child = supervisor.add(ChildProcess("child", [sys.executable, "-c", script], 60.0, is_relayed=True))
        supervisor.wait_for(lambda: child.line("ready"))
        wait_for(lambda: child.code is not None, "the child has ended")
    assert capsys.readouterr().err == "\r\x1b[Ka log line\n"
