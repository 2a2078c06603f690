"""A process's temporary directory does not outlive it by long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
from swarm_protocol.process.scratch import scratch_directory
assert scratch_directory() == scratch_directory()
(scratch_directory() / "socket").touch()
print(scratch_directory(), flush=True)
if sys.argv[1] == "fork":
    if os.fork() == 0:
        print(scratch_directory(), flush=True)
        sys.exit()
    os.wait()
elif sys.argv[1] == "wait":
    sys.stdin.read()
elif sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(how: str, directory: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )


def made_by(how: str, directory: Path) -> list[Path]:
    process = start(how, directory)
    return [Path(line) for line in process.communicate()[0].splitlines()]


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


def test_it_leaves_with_its_process(directory: Path) -> None:
    (made,) = made_by("end", directory)
    assert made.parent == directory
    assert list(directory.iterdir()) == []


def test_threads_that_ask_at_once_get_the_same(directory: Path) -> None:
    script = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from swarm_protocol.process.scratch import scratch_directory
together = Barrier(8)
with ThreadPoolExecutor(8) as threads:
    made = list(threads.map(lambda _: (together.wait(), scratch_directory())[1], range(8)))
print(len(set(made)))
"""
    environment = {**os.environ, "TMPDIR": str(directory)}
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment).stdout
    assert printed == "1\n"
    assert list(directory.iterdir()) == []


def test_a_forked_process_has_its_own(directory: Path) -> None:
    ours, childs = made_by("fork", directory)
    assert ours != childs
    assert list(directory.iterdir()) == []


def test_what_a_killed_process_leaves_goes_with_the_next_start(directory: Path) -> None:
    with start("wait", directory) as living:
        of_living = Path(living.stdout.readline().strip())
        (of_dead,) = made_by("kill", directory)
        assert set(directory.iterdir()) == {of_living, of_dead}
        foreign = directory / "swarm-lm-1-data"  # whose name only looks like ours
        foreign.mkdir()
        (foreign / "lock").touch()
        made_by("end", directory)
        assert set(directory.iterdir()) == {of_living, foreign}
        assert (of_living / "socket").exists()
    assert set(directory.iterdir()) == {foreign}


def test_files_are_where_the_user_wants_them_and_sockets_have_short_paths(tmp_path: Path) -> None:
    wanted = tmp_path / ("long" * 20)
    wanted.mkdir()
    script = """
from swarm_protocol.process.scratch import scratch_directory, socket_directory
print(scratch_directory(), socket_directory(), sep="\\n")
"""
    environment = {**os.environ, "TMPDIR": str(wanted)}
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment).stdout
    files, sockets = map(Path, printed.splitlines())
    assert files.parent == wanted
    longest = sockets / "p2pclient-0123456789a.sock"  # of hivemind
    assert len(os.fsencode(longest)) <= 103
    assert not files.exists()
    assert not sockets.exists()
