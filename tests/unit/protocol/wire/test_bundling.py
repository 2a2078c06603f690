"""What is ready at the same time travels in one message."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.bundling import Outbox
from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, MIB, PART_BYTES
from tests.unit.support import resident_bytes, run

FATAL = 99  # the entry that cannot be filled in


def sent_of(*turns: list[pb.TakenStep]) -> list[list[int]]:
    """The numbers in each message; between two turns, the event loop has nothing else to do."""
    messages: list[list[int]] = []

    async def send(message: pb.TakenBundle) -> None:
        await asyncio.sleep(0)
        messages.append([entry.number for entry in message.steps])

    async def story() -> None:
        outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", send)
        sending = asyncio.ensure_future(outbox.send_all())
        for turn in turns:
            for entry in turn:
                outbox.put(entry)
            while outbox.size_bytes or sum(map(len, messages)) < sum(map(len, turns[: turns.index(turn) + 1])):
                await asyncio.sleep(0)
        sending.cancel()

    run(story())
    return messages


def small(*numbers: int) -> list[pb.TakenStep]:
    return [pb.TakenStep(number=number) for number in numbers]


def test_what_is_put_in_one_turn_is_one_message() -> None:
    assert sent_of(small(1, 2, 3), small(4), small(5, 6)) == [[1, 2, 3], [4], [5, 6]]


async def test_tasks_that_are_ready_together_share_a_message() -> None:
    messages: list[list[int]] = []

    async def send(message: pb.TakenBundle) -> None:
        messages.append([entry.number for entry in message.steps])

    outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", send)
    sending = asyncio.ensure_future(outbox.send_all())
    gate = asyncio.Event()

    async def put(number: int) -> None:
        await gate.wait()
        outbox.put(*small(number))

    tasks = [asyncio.ensure_future(put(number)) for number in range(1, 9)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    while outbox.size_bytes:
        await asyncio.sleep(0)
    sending.cancel()
    assert messages == [list(range(1, 9))]


def test_no_message_has_too_many_entries_or_bytes() -> None:
    numbers = list(range(1, 2 * MAX_BUNDLED + 2))
    sizes = [len(message) for message in sent_of(small(*numbers))]
    assert sizes == [MAX_BUNDLED, MAX_BUNDLED, 1]
    large = [pb.TakenStep(number=number, push_key=bytes(MAX_BUNDLED_BYTES - 32)) for number in range(1, 18)]
    per_message = PART_BYTES // large[0].ByteSize()
    messages = sent_of(large)
    assert [number for message in messages for number in message] == list(range(1, 18))
    assert all(len(message) <= per_message for message in messages)


async def test_an_entry_that_is_not_filled_in_or_too_large_is_not_sent() -> None:
    messages: list[list[int]] = []

    async def send(message: pb.TakenBundle) -> None:
        messages.append([entry.number for entry in message.steps])

    def filled(number: int, size_bytes: int = 0, rest: bytes = b"") -> bool:
        def fill(entry: pb.TakenStep) -> bytes:
            entry.number, entry.push_key = number, bytes(size_bytes)
            if number == FATAL:
                raise MemoryError
            return rest

        return outbox.put_filled(fill)

    outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", send)
    sending = asyncio.ensure_future(outbox.send_all())
    assert not filled(1, MAX_BUNDLED_BYTES) and not filled(2, rest=b"more")
    with pytest.raises(MemoryError):
        filled(FATAL)
    assert outbox.size_bytes == 0
    numbers = range(3, 3 + MAX_BUNDLED)
    assert all(filled(number) for number in numbers)
    assert not filled(1, MAX_BUNDLED_BYTES)
    await asyncio.sleep(0)
    outbox.close()
    await sending
    assert messages == [list(numbers)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_entries_that_are_too_large_keep_no_memory() -> None:
    """A message keeps what its removed entries took, as long as it waits for a client that does not read."""

    async def send(_message: pb.TakenBundle) -> None: ...

    outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", send)
    outbox.put(pb.TakenStep(number=1))
    content, before = bytes(MIB), resident_bytes()
    for _ in range(64):
        assert not outbox.put_filled(lambda entry: setattr(entry, "push_key", content))
    assert resident_bytes() - before < 16 * MIB
