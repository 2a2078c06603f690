"""Who has ended gets no signal any more, even if another has its number."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from swarm_protocol.process.handle import ProcessHandle
from tests.swarm.waiting import wait_for

LAST = Path("/proc/sys/kernel/ns_last_pid")
# A process that starts threads until one of them has the number that it is told, and says so; then it waits.
OTHER = """
import sys, threading
last, number = open(sys.argv[1], "w", buffering=1), int(sys.argv[2])
stay = threading.Event()
found = False
for _ in range(1000):
    last.seek(0)
    last.write(f"{number - 1}\\n")
    thread = threading.Thread(target=stay.wait, daemon=True)
    thread.start()
    if thread.native_id == number:
        found = True
        break
print(found, flush=True)
stay.wait()
"""


def sleeping() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=-1, text=True)


@pytest.fixture(params=["by descriptor", "by start time", "by start time in a container"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How processes are told apart: the second way is for systems without pidfd, or that do not permit it."""

    def refused(_pid: int) -> int:
        raise PermissionError(errno.EPERM, "a filter of system calls refuses this one")

    if request.param == "by start time":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    elif request.param == "by start time in a container":
        monkeypatch.setattr(os, "pidfd_open", refused, raising=False)


@pytest.mark.usefixtures("known")
def test_a_signal_ends_it() -> None:
    with sleeping() as process:
        handle = ProcessHandle(process.pid)
        assert handle.is_alive and handle.pid == process.pid
        handle.signal(signal.SIGTERM)
        wait_for(lambda: not handle.is_alive, "the process is gone")
        assert process.wait() == -signal.SIGTERM
        handle.signal(signal.SIGTERM)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
def test_its_descriptor_is_closed_once_it_is_known_to_have_ended_or_nobody_asks() -> None:
    def descriptors() -> int:
        return sum("pidfd" in target for target in map(target_of, os.listdir("/proc/self/fd")))

    def target_of(number: str) -> str:
        with suppress(FileNotFoundError):
            return os.readlink(f"/proc/self/fd/{number}")
        return ""

    before = descriptors()
    for asks in (True, False):
        process = sleeping()
        handle = ProcessHandle(process.pid)
        process.kill()
        process.communicate()
        assert descriptors() == before + 1
        assert not asks or not handle.is_alive
        del handle, process
        assert descriptors() == before


@pytest.mark.usefixtures("known")
def test_who_has_ended_before_is_not_alive() -> None:
    with sleeping() as process:
        process.kill()
        process.wait()
        handle = ProcessHandle(process.pid)
        assert not handle.is_alive
        handle.signal(signal.SIGKILL)


@pytest.mark.skipif(not os.access(LAST, os.W_OK), reason="numbers of processes cannot be chosen here")
@pytest.mark.usefixtures("known")
def test_another_that_has_its_number_is_left_alone() -> None:
    ended = sleeping()
    handle = ProcessHandle(ended.pid)
    ended.kill()
    ended.communicate()
    with subprocess.Popen([sys.executable, "-c", OTHER, str(LAST), str(ended.pid)], stdout=-1, text=True) as other:
        try:
            assert other.stdout is not None
            if other.stdout.readline() != "True\n":
                pytest.skip("somebody else has the number")
            assert not handle.is_alive
            handle.signal(signal.SIGKILL)
            assert other.poll() is None
            os.kill(ended.pid, signal.SIGTERM)  # a number is that of any thread
            assert other.wait() == -signal.SIGTERM
        finally:
            other.kill()
