"""What is ready at the same time travels in one message."""

from __future__ import annotations

import asyncio

import pytest

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.bundling import Outbox
from swarm_protocol.wire.constants import MAX_BUNDLED, MAX_BUNDLED_BYTES, PART_BYTES
from tests.unit.support import run


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


def test_no_message_has_too_many_entries_or_bytes() -> None:
    numbers = list(range(1, 2 * MAX_BUNDLED + 2))
    sizes = [len(message) for message in sent_of(small(*numbers))]
    assert sizes == [MAX_BUNDLED, MAX_BUNDLED, 1]
    large = [pb.TakenStep(number=number, push_key=bytes(MAX_BUNDLED_BYTES - 32)) for number in range(1, 18)]
    per_message = PART_BYTES // large[0].ByteSize()
    messages = sent_of(large)
    assert [number for message in messages for number in message] == list(range(1, 18))
    assert all(len(message) <= per_message for message in messages)


@pytest.mark.parametrize("size_bytes", [0, 1, 100, 127, 128, 300, 16_384, MAX_BUNDLED_BYTES])
async def test_encoded_entries_are_sent_as_the_message_that_has_them(size_bytes: int) -> None:
    messages: list[pb.TakenBundle] = []

    async def send(message: pb.TakenBundle) -> None:
        messages.append(message)

    outbox = Outbox[pb.TakenStep](pb.TakenBundle, "steps", send)
    entries = [pb.TakenStep(number=7), pb.TakenStep(push_key=bytes(size_bytes)), pb.TakenStep(lost=True)]
    for entry in entries:
        outbox.put_encoded(entry.SerializeToString())
    assert outbox.size_bytes == sum(entry.ByteSize() for entry in entries)
    sending = asyncio.ensure_future(outbox.send_all())
    await asyncio.sleep(0)
    outbox.close()
    await sending
    assert messages == [pb.TakenBundle(steps=entries)] and outbox.size_bytes == 0
