"""One holder at a time, by flock or, as on Windows, by the lock of a byte."""

from __future__ import annotations

import os
import struct
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from swarm_protocol import file_lock
from swarm_protocol.file_lock import lock, try_lock


class ByteLocks:
    """A stand-in for msvcrt: Linux's locks of ranges that belong to an open file, which the kernel checks."""

    LK_NBLCK = 2

    def locking(self, descriptor: int, _mode: int, count: int) -> None:
        import fcntl

        begin = os.lseek(descriptor, 0, os.SEEK_CUR)
        wanted = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, begin, count, 0)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None


@pytest.fixture(params=["flock", "byte"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "byte" and sys.platform == "linux":
        monkeypatch.setattr(file_lock, "fcntl", None)
        monkeypatch.setitem(sys.modules, "msvcrt", ByteLocks())
    elif (request.param == "byte") != (sys.platform == "win32"):
        pytest.skip("this system has other locks")
    return request.param


@pytest.fixture
def files(tmp_path: Path) -> tuple[IO[str], IO[str]]:
    (tmp_path / "file").write_text("content")
    return open(tmp_path / "file", "r+"), open(tmp_path / "file", "r+")


@pytest.mark.usefixtures("kind")
def test_there_is_one_holder_until_it_closes_the_file(files: tuple[IO[str], IO[str]]) -> None:
    first, second = files
    assert try_lock(first) and not try_lock(second)
    assert second.read() == first.read() == "content"  # whoever holds the lock
    first.close()
    assert try_lock(second.fileno())
    second.close()


@pytest.mark.usefixtures("kind")
def test_whoever_waits_gets_it_when_it_is_released(files: tuple[IO[str], IO[str]]) -> None:
    first, second = files
    lock(first)
    waiting = threading.Thread(target=lock, args=(second,))
    waiting.start()
    with open(first.name, "r+") as third:
        assert not try_lock(third)
    first.close()
    waiting.join(60)
    assert not waiting.is_alive()
    with open(second.name, "r+") as third:
        assert not try_lock(third)
    second.close()


@pytest.mark.skipif(sys.platform == "win32", reason="locks of a byte are not shared")
def test_who_asks_whether_it_is_held_may_be_one_of_many(files: tuple[IO[str], IO[str]]) -> None:
    first, second = files
    assert try_lock(first, shared=True) and try_lock(second, shared=True)
    first.close()
    with open(second.name, "r+") as third:
        assert not try_lock(third)
    second.close()


@pytest.mark.usefixtures("kind")
def test_an_error_of_another_kind_is_raised(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        descriptor = file.fileno()
    with pytest.raises(OSError):
        try_lock(descriptor)
