"""What is kept outside the cache may be dropped, the oldest first; what is held is read back as it was."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm_protocol.errors import PeerBusy
from swarm_server.kv import offload as module
from swarm_server.kv.offload import CHUNK_BYTES, KvOffload, num_chunks
from tests.unit.support import TIMEOUT_S


def entry(number: int, size_bytes: int = 10) -> torch.Tensor:
    return torch.full((size_bytes,), number, dtype=torch.uint8)


def keep(offload: KvOffload, *numbers: int, size_bytes: int = 10) -> None:
    for number in numbers:
        offload.keep(bytes([number]), size_bytes, lambda number=number: entry(number, size_bytes))


def found(offload: KvOffload, *numbers: int) -> list[int]:
    """Which of them are there, each as it was."""
    there = []
    for number in numbers:
        data = offload.read(bytes([number]))
        if data is not None:
            assert torch.equal(data, entry(number, data.numel()))
            there.append(number)
    return there


def wait_for_disk(offload: KvOffload) -> None:
    with offload._changed:
        assert offload._changed.wait_for(lambda: not offload._waiting, TIMEOUT_S)


def test_without_room_nothing_is_kept_or_held() -> None:
    offload = KvOffload()
    keep(offload, 1)
    assert not offload.is_used and offload.read(b"\x01") is None
    assert not offload.hold(b"\x01", entry(1))
    offload.close()


def test_the_least_recently_used_entry_is_dropped_from_memory() -> None:
    offload = KvOffload(memory_bytes=30)
    keep(offload, 1, 2, 3)
    assert found(offload, 1) == [1]
    keep(offload, 2, 4)
    assert found(offload, 1, 2, 3, 4) == [1, 2, 4]
    assert offload.used_bytes == {"memory": 30, "disk": 0}


def test_what_memory_has_no_room_for_goes_to_disk_and_then_away(tmp_path: Path) -> None:
    size_bytes = 2 * CHUNK_BYTES + 7
    offload = KvOffload(2 * size_bytes, 6 * CHUNK_BYTES, tmp_path)
    for number in range(6):
        keep(offload, number, size_bytes=size_bytes)
        wait_for_disk(offload)
    assert found(offload, *range(6)) == [2, 3, 4, 5]
    assert offload.used_bytes == {"memory": 2 * size_bytes, "disk": 6 * CHUNK_BYTES}
    assert not list(tmp_path.iterdir())  # the file has no name
    offload.close()
    assert found(offload, 2, 3) == []


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_what_is_held_stays_until_each_hold_is_released(tmp_path: Path, place: str) -> None:
    offload = KvOffload(20, 0) if place == "memory" else KvOffload(0, 2 * CHUNK_BYTES, tmp_path)
    key = b"\x01"
    assert offload.hold(key, entry(1)) and offload.hold_known(key)
    keep(offload, 2, 3)
    wait_for_disk(offload)
    assert found(offload, 1, 2, 3) == [1, 3]
    assert not offload.hold(b"\x09", entry(9, 2 * CHUNK_BYTES)), "there is no room for both"
    offload.release(key, keeps=False)
    keep(offload, 4)
    wait_for_disk(offload)
    assert found(offload, 1, 4) == [1, 4]
    offload.release(key, keeps=False)
    assert found(offload, 1, 4) == [4]
    assert not offload.hold_known(key)
    offload.close()


def test_a_released_entry_that_others_may_use_stays_while_there_is_room() -> None:
    offload = KvOffload(memory_bytes=20)
    assert offload.hold(b"\x01", entry(1))
    offload.release(b"\x01", keeps=True)
    keep(offload, 2)
    assert found(offload, 1) == [1]
    keep(offload, 3, 4)
    assert found(offload, 1, 3, 4) == [3, 4]


def test_a_full_disk_drops_the_entry_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    offload = KvOffload(0, 2 * CHUNK_BYTES, tmp_path)

    def write(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(offload._file, "write", write)
    assert not offload.hold(b"\x01", entry(1))
    keep(offload, 2)
    wait_for_disk(offload)
    assert found(offload, 1, 2) == [] and offload.used_bytes["disk"] == 0
    assert caplog.text.count("keys and values cannot be written to disk for 60 s: [Errno 28] No space left on dev") == 1
    offload.close()


def test_a_slow_disk_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_QUEUED_BYTES", 20)
    offload = KvOffload(0, 9 * CHUNK_BYTES, tmp_path)
    goes_on, write = threading.Event(), offload._file.write

    def write_slowly(*args: object) -> None:
        assert goes_on.wait(TIMEOUT_S)
        write(*args)

    monkeypatch.setattr(offload._file, "write", write_slowly)
    keep(offload, 1, 2, 3)
    assert found(offload, 1, 2, 3) == [1, 2], "those that wait to be written are there, too"
    goes_on.set()
    wait_for_disk(offload)
    assert found(offload, 1, 2, 3) == [1, 2]
    offload.close()


def test_what_was_written_before_the_disk_was_full_can_still_be_read(tmp_path: Path, monkeypatch) -> None:
    """The file takes a few bytes at a time, and then no more."""
    offload = KvOffload(0, 9 * CHUNK_BYTES, tmp_path)
    raw = offload._file._file
    left = [CHUNK_BYTES + 500]

    class Slow:
        seek, readinto, close = raw.seek, raw.readinto, raw.close

        def write(self, data: memoryview) -> int:
            if not left[0]:
                raise OSError(28, "No space left on device")
            count = min(len(data), 1000, left[0])
            left[0] -= count
            return raw.write(data[:count])

    monkeypatch.setattr(offload._file, "_file", Slow())
    assert offload.hold(b"\x01", entry(1, CHUNK_BYTES + 100))
    assert not offload.hold(b"\x02", entry(2, 1000))
    assert found(offload, 1, 2) == [1]
    offload.close()


def test_bytes_are_packed_only_if_there_is_room(tmp_path: Path) -> None:
    offload = KvOffload(20)
    assert offload.hold(b"\x01", entry(1, 15))
    offload.keep(b"\x02", 10, lambda: pytest.fail("there is no room"))
    offload.close()


def test_nothing_is_kept_or_held_after_the_end(tmp_path: Path) -> None:
    offload = KvOffload(30, CHUNK_BYTES, tmp_path)
    assert offload.hold(b"\x01", entry(1))
    offload.close()
    keep(offload, 2)
    assert found(offload, 1, 2) == [] and not offload.hold(b"\x03", entry(3))
    offload.release(b"\x01", keeps=True)


async def test_calls_that_wait_for_a_thread_end_after_the_end_and_later_ones_are_refused() -> None:
    offload, gate = KvOffload(memory_bytes=100), threading.Event()
    calls = [asyncio.ensure_future(offload.in_thread(gate.wait)) for _ in range(2 * module._NUM_THREADS)]
    await asyncio.sleep(0)  # all calls are submitted, and half of them wait for a thread
    offload.close()
    gate.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert all(await asyncio.gather(*calls))
    with pytest.raises(PeerBusy, match="have been dropped"):
        await offload.in_thread(gate.is_set)


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        KvOffload(0, CHUNK_BYTES, tmp_path / "file")


class Machine(RuleBasedStateMachine):
    """Any order of calls, beside a dictionary that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.offload = KvOffload(3 * 10, 4 * CHUNK_BYTES, Path(self.directory.name))
        self.holds: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    def size_of(self, number: int) -> int:
        return self.sizes.setdefault(number, [1, 10, 25, CHUNK_BYTES + 1][number % 4])

    @rule(number=st.integers(0, 11))
    def keep(self, number: int) -> None:
        keep(self.offload, number, size_bytes=self.size_of(number))

    @rule(number=st.integers(0, 11))
    def hold(self, number: int) -> None:
        size_bytes = self.size_of(number)
        fits_memory = size_bytes <= self.offload._memory.unheld_bytes
        fits_disk = num_chunks(size_bytes) * CHUNK_BYTES <= self.offload._disk.unheld_bytes
        is_held = self.offload.hold(bytes([number]), entry(number, size_bytes))
        assert is_held or not (fits_memory or fits_disk or self.holds.get(number))
        self.holds[number] = self.holds.get(number, 0) + is_held

    @precondition(lambda self: any(self.holds.values()))
    @rule(choice=st.integers(0, 11), keeps=st.booleans())
    def release(self, choice: int, keeps: bool) -> None:
        held = [number for number, count in self.holds.items() if count]
        number = held[choice % len(held)]
        self.offload.release(bytes([number]), keeps=keeps)
        self.holds[number] -= 1

    @invariant()
    def what_is_held_is_there_and_fits(self) -> None:
        wait_for_disk(self.offload)
        held = [number for number, count in self.holds.items() if count]
        assert found(self.offload, *held) == held
        for number in found(self.offload, *range(12)):
            data = self.offload.read(bytes([number]))
            assert data is not None and data.numel() == self.size_of(number)
        for place, size_bytes in self.offload.used_bytes.items():
            assert 0 <= size_bytes <= self.offload.capacity_bytes[place]

    def teardown(self) -> None:
        wait_for_disk(self.offload)
        for number, count in self.holds.items():
            for _ in range(count):
                self.offload.release(bytes([number]), keeps=False)
        there = found(self.offload, *range(12))
        sizes = [self.size_of(number) for number in there]
        used = self.offload.used_bytes
        chunks = used["disk"] // CHUNK_BYTES
        assert used["memory"] + chunks * CHUNK_BYTES >= sum(sizes)
        assert chunks <= sum(map(num_chunks, sizes))
        self.offload.close()
        self.directory.cleanup()


TestMachine = pytest.mark.timeout(60)(Machine.TestCase)
TestMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
