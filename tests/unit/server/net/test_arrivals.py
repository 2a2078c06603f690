"""What is arriving is bounded, counts once it is there, and may not come too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack

import pytest
import torch

from swarm_protocol.errors import PeerBusy, RequestRejected, SessionLost
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import Assembler, encode
from swarm_protocol.wire.constants import MIB, PART_BYTES
from swarm_server.net.arrivals import Arrivals, ArrivingTensor, ByteReservation
from swarm_server.net.incoming import Incoming
from tests.worlds.virtual_time import run_virtually

LINE_BYTES_PER_S = 125_000  # 1 Mbit/s
TENSOR = torch.randn(5, MIB // 4)
HEADER, PARTS = encode(TENSOR)
FIRST = pb.ForwardRequest(forward=pb.Forward(hidden=HEADER))


def arriving(arrivals: Arrivals, num_parts: int = len(PARTS)) -> ArrivingTensor:
    tensor = ArrivingTensor(arrivals, Assembler(HEADER))
    for part in PARTS[:num_parts]:
        tensor.add(part)
    return tensor


class TestRoom:
    def test_bytes_count_as_they_come_and_until_the_tensor_is_there(self) -> None:
        arrivals = Arrivals(20 * MIB)
        for num_parts in range(4):
            with arriving(arrivals, num_parts):
                assert arrivals.used_bytes == (1 + num_parts) * MIB
        with arriving(arrivals) as tensor:
            assert torch.equal(tensor.tensor(), TENSOR)
        assert arrivals.used_bytes == 0

    def test_what_is_announced_but_does_not_come_takes_no_room(self) -> None:
        arrivals = Arrivals(1)
        header = pb.Tensor(dtype=pb.FLOAT32, shape=[MIB], size_bytes=4 * MIB)
        assert not ArrivingTensor(arrivals, Assembler(header)).complete

    def test_there_is_no_room_for_more_at_once(self) -> None:
        arrivals = Arrivals(8 * MIB)
        first, second = arriving(arrivals), arriving(arrivals, 2)
        with pytest.raises(PeerBusy, match=f"no room for {MIB} bytes more .* {8 * MIB} of {8 * MIB} bytes are in use"):
            second.add(PARTS[2])
        with pytest.raises(PeerBusy):
            arriving(arrivals)
        second.close()
        arriving(arrivals, 2).close()
        first.close()
        assert arrivals.used_bytes == 0

    def test_one_client_does_not_take_all(self) -> None:
        arrivals = Arrivals(20 * MIB)
        stalled = []
        with pytest.raises(PeerBusy, match=f"{15 * MIB} of {20 * MIB} bytes are in use, {15 * MIB} of them by this"):
            while True:
                stalled.append(ByteReservation(arrivals.of(Caller("attacker"))))
                stalled[-1].take(MIB)
        with arriving(arrivals.of(Caller("honest")), 2), pytest.raises(PeerBusy):
            stalled[-1].take(MIB)
        for reservation in stalled:
            reservation.close()
        assert arrivals.used_bytes == 0

    def test_a_reservation_gives_back_once(self) -> None:
        arrivals = Arrivals(10)
        with ByteReservation(arrivals) as reservation:
            reservation.take(4)
            reservation.take(6)
            with pytest.raises(PeerBusy):
                reservation.take(1)
            reservation.close()
        assert arrivals.used_bytes == 0

    def test_tiny_parts_are_refused(self) -> None:
        tensor = arriving(Arrivals(), 0)
        with pytest.raises(RequestRejected, match="a part of a tensor is empty"):
            tensor.add(b"")
        with pytest.raises(RequestRejected, match=f"very many parts: expected parts of {PART_BYTES} bytes"):
            for _ in range(1000):
                tensor.add(b"x")


async def slowly(messages: Iterable[pb.ForwardRequest], pauses_s: Iterable[float]) -> AsyncIterator[pb.ForwardRequest]:
    for message, pause_s in zip(messages, pauses_s, strict=False):
        await asyncio.sleep(pause_s)
        yield message


def received(arrivals: Arrivals, messages: Iterable[pb.ForwardRequest], pauses_s: Iterable[float]) -> torch.Tensor:
    """What is read of a stream whose messages come after these pauses, on a clock of its own."""

    async def read() -> torch.Tensor:
        incoming = Incoming(slowly(messages, pauses_s), arrivals)
        first = await incoming.first("forward")
        with ExitStack() as request:
            tensor = await incoming.collect(Assembler(first.forward.hidden), request)
            assert arrivals.used_bytes == TENSOR.nbytes  # until it is computed
        assert arrivals.used_bytes == 0
        return tensor

    return run_virtually(read())


def parts_of(size_bytes: int, data: bytes = b"".join([HEADER.data, *PARTS])) -> list[pb.ForwardRequest]:
    bare = pb.Tensor(dtype=HEADER.dtype, shape=HEADER.shape, size_bytes=HEADER.size_bytes)
    pieces = [data[start : start + size_bytes] for start in range(0, len(data), size_bytes)]
    return [pb.ForwardRequest(forward=pb.Forward(hidden=bare)), *(pb.ForwardRequest(more=piece) for piece in pieces)]


class TestPace:
    @pytest.mark.parametrize("num_streams", [1, 7])
    def test_a_slow_line_is_no_attack_even_shared_by_several_streams(self, num_streams: int) -> None:
        messages = parts_of(PART_BYTES)
        pause_s = num_streams * PART_BYTES / LINE_BYTES_PER_S
        assert torch.equal(received(Arrivals(), messages, [0.0] + [pause_s] * len(PARTS) * 2), TENSOR)

    def test_a_short_pause_is_none_either(self) -> None:
        messages = parts_of(PART_BYTES)
        assert torch.equal(received(Arrivals(), messages, [0, 1, 19, 1, 19, 1]), TENSOR)

    def test_silence_ends_a_stream(self) -> None:
        arrivals = Arrivals()
        with pytest.raises(SessionLost, match=r"came too slowly: expected 16384 bytes per second, .* beyond 20 s"):
            received(arrivals, parts_of(PART_BYTES), [0, 1, 1, 100])
        assert arrivals.used_bytes == 0

    def test_a_stream_that_never_begins_ends(self) -> None:
        with pytest.raises(SessionLost):
            received(Arrivals(), [FIRST], [100])

    def test_so_does_a_byte_a_second(self) -> None:
        arrivals = Arrivals()
        data = pb.ForwardRequest(more=b"x")
        with pytest.raises(SessionLost, match="came too slowly"):
            received(arrivals, [FIRST, *[data] * 90], [0, *[1.0] * 90])
        assert arrivals.used_bytes == 0

    def test_what_came_fast_buys_no_longer_silence(self) -> None:
        with pytest.raises(SessionLost):
            received(Arrivals(), parts_of(PART_BYTES), [0, 0, 0, 0, 0, 90])

    @pytest.mark.run_by(function=run_virtually)
    async def test_between_requests_there_may_be_silence(self) -> None:
        incoming = Incoming(slowly([FIRST, FIRST, FIRST], [500, 500, 700]), Arrivals())
        found = [await incoming.begin(600), await incoming.begin(600)]
        with pytest.raises(SessionLost, match="closed after 600 s without a request"):
            await incoming.begin(600)
        assert found == [FIRST, FIRST]
