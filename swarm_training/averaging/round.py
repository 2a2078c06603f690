"""One member's part in one phase of an averaging: it sends parts to owners, adds up its chunks, collects the means.

All members, the owner too, decode the mean of a chunk from the bytes that the owner has encoded once. They therefore
get the same bits under any codec. A large group makes the first attempt on a grid, see ``GridAttempt``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarm_protocol.codecs.bitmap import contains, fits, from_bits, to_bits
from swarm_protocol.errors import PeerUnavailable, RequestRejected, SwarmError
from swarm_protocol.process.routine import end_tasks
from swarm_training.averaging.attempt import DirectAttempt
from swarm_training.averaging.chunks import cut
from swarm_training.averaging.grid import Grid
from swarm_training.averaging.grid_attempt import GridAttempt
from swarm_training.averaging.group import Group
from swarm_training.compression.codecs import Codec
from swarm_training.compression.error_feedback import ChunkPlace, ErrorFeedback
from swarm_training.core.callbacks import InThread
from swarm_training.core.network import MessageStream, Network, ReduceStream
from swarm_training.pb import training_pb2 as pb

_GIVE_UP = 1.5  # deadlines to wait for an owner, which itself waits for stragglers


@dataclass(frozen=True)
class VectorCoding:
    """The coding of vectors on the wire: chunks of at most ``chunk_elements``, each encoded by ``codec``. ``encoder``:
    the memory of what encoding loses; None: losses are not remembered."""

    codec: Codec
    chunk_elements: int
    encoder: ErrorFeedback | None = None


class AveragingRound:
    """One member's part in one phase of an averaging.

    Attributes:
        vector: the vector that this member adds, [n] in the codec's type.
        results: the encoded mean of each chunk.
        broken: numbers of members that could not be reached, or answered with an error or with something wrong.
        bytes_sent, bytes_received: the bytes of parts and means that this member has sent and received.
    """

    def __init__(
        self,
        network: Network,
        group: Group,
        me: int,
        phase: int,
        vector: Tensor,
        coding: VectorCoding,
        clipping: InThread | None = None,
    ) -> None:
        """Cut the vector. ``me``: this member's number in the group. ``clipping``: see ``DirectAttempt``."""
        self.group = group
        self.phase = phase
        self.chunks = cut(len(vector), group.layout, coding.chunk_elements)
        self.results: dict[int, bytes] = {}
        self.broken: set[int] = set()
        self.bytes_sent = self.bytes_received = 0
        self._network = network
        self._me = me
        self.vector = vector
        self._length, self._num_members = len(vector), len(group.members)
        self._codec, self._encoder = coding.codec, coding.encoder
        self._clipping = clipping
        self._dropped: set[int] = set()
        self._counted: dict[int, bytes] = {}  # by result: the members whose parts are in it, one bit for each
        self._settled: set[ChunkPlace] = set()
        self._attempts: list[DirectAttempt | GridAttempt] = []
        self._opened = asyncio.Condition()
        self._exchanges: dict[int, asyncio.Task[None]] = {}  # by owner

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.chunks)

    @property
    def settled(self) -> set[ChunkPlace]:
        """Return the places of the chunks of which the results contain what this member has encoded. The chunks' owners
        report whether its parts are in them."""
        parts = (number for number, counted in self._counted.items() if contains(counted, self._me))
        return {self._place("part", number) for number in parts} | self._settled

    async def mean(self) -> Tensor:
        """Return the mean, [n] in the vector's type; all results must be there."""
        assert self.is_complete
        mean = torch.empty_like(self.vector)
        for number, chunk in enumerate(self.chunks):
            await asyncio.sleep(0)  # heartbeats have their turn: decoding a whole vector may take seconds
            mean[chunk.start : chunk.stop] = self._codec.decode(self.results[number], chunk.stop - chunk.start)
        return mean

    def take_over(self, earlier: AveragingRound) -> None:
        """Take over the results of an earlier round of another group. Which chunks are settled follows from that round
        alone: the present vector is not in its results."""
        self.results = dict(earlier.results)
        self._settled = earlier.settled

    def forget_vector(self) -> None:
        """Free the vector. It is not added up again: other members may still request results, but no parts."""
        self.vector = self.vector.new_empty(0)

    def drop(self, member: int) -> None:
        """Stop waiting for the parts and results of a member that has dropped out."""
        self._dropped.add(member)
        for attempt in self._attempts:
            attempt.leave_out(member)
            if isinstance(attempt, GridAttempt):
                attempt.close(member)
        if member in self._exchanges:
            self._exchanges[member].cancel()

    async def first_attempt(self) -> None:
        if not self.group.grid or self._clipping is not None:  # clipping needs all parts in one place
            await self._try(self._flat({number: chunk.owner for number, chunk in enumerate(self.chunks)}))
            return
        weights = {number: member.weight for number, member in enumerate(self.group.members) if member.weight}
        grid = Grid.of(self.group.layout)
        attempt = GridAttempt(grid, self._me, self.chunks, weights, self._dropped, partial(self._encode, "mean"))
        await self._try(attempt)
        self.broken |= attempt.late

    async def repair(self, fetch: Mapping[int, int], redo: Mapping[int, int]) -> None:
        """Fetch missing chunks, and redo others. Both map chunks to members: the source, or the new owner. Raise
        ValueError if an argument names a chunk or a member that does not exist."""
        for number, member in (*fetch.items(), *redo.items()):
            if number >= len(self.chunks) or member >= self._num_members:
                raise ValueError("a plan names a chunk or a member that does not exist")
        for number in redo:
            self.results.pop(number, None)
            self._counted.pop(number, None)
            self._settled -= {self._place(what, number) for what in ("part", "row", "mean")}
        wanted: dict[int, list[int]] = {}
        for number, member in fetch.items():
            if number not in self.results and member != self._me:
                wanted.setdefault(member, []).append(number)
        redone = self._try(self._flat(redo))
        await asyncio.gather(redone, *(self._fetch(member, numbers) for member, numbers in wanted.items()))

    async def serve_reduce(self, member: int, number: int, stream: MessageStream[pb.Chunk, pb.ReduceRequest]) -> None:
        """Receive a member's parts of this member's chunks, and send it the means. ``number``: that of the attempt."""
        async with self._opened:  # the member may have begun the attempt before this peer
            async with asyncio.timeout(self.group.deadline_s):
                await self._opened.wait_for(lambda: len(self._attempts) > number)
        attempt = self._attempts[number]
        taking = asyncio.create_task(self._take_parts(member, attempt, stream))
        try:
            for chunk in attempt.serves(member):
                data = await attempt.mean_of(chunk)
                if data is None:
                    continue  # no part has arrived for the chunk, or it is lost
                await stream.send(pb.Chunk(index=chunk, data=data, counted=self._bits(attempt.counted(chunk))))
                self.bytes_sent += len(data)
            await stream.finish()
        finally:
            taking.cancel()

    def serve_fetch(self, numbers: Iterable[int]) -> Iterator[pb.Chunk]:
        for number in numbers:
            data = self.results.get(number)
            if data is not None:
                self.bytes_sent += len(data)
                yield pb.Chunk(index=number, data=data, counted=self._counted.get(number, b""))

    def _flat(self, owners: Mapping[int, int]) -> DirectAttempt:
        """Return an attempt without a grid. ``owners``: the chunks to be averaged, each with its owner."""
        weights = {j: float(m.weight) for j, m in enumerate(self.group.members) if m.weight}
        num_micro_batches = self.group.num_micro_batches
        if not num_micro_batches:
            weights = {j: weight for j, weight in weights.items() if j not in self._dropped}
        encode = partial(self._encode, "mean")
        attempt = DirectAttempt(owners, self._me, weights, encode, self._clipping, num_micro_batches)
        for member in self._dropped if num_micro_batches else ():  # the attempt ends at once: their parts are needed
            attempt.leave_out(member)
        return attempt

    async def _try(self, attempt: DirectAttempt | GridAttempt) -> None:
        """Run an attempt until all means that will arrive are there."""
        async with self._opened:
            self._attempts.append(attempt)
            self._opened.notify_all()
        index = len(self._attempts) - 1
        self._exchanges = {
            target: asyncio.create_task(self._exchange(target, attempt, index))
            for target in attempt.targets
            if target not in self._dropped
        }
        tasks = [*self._exchanges.values()]
        timers: list[asyncio.TimerHandle] = []
        tasks.append(asyncio.create_task(self._own(attempt)))  # it takes each mean soon, so that few stay in memory
        try:
            for number in attempt.own:
                await asyncio.sleep(0)  # heartbeats have their turn: a lone owner adds up the whole vector
                attempt.put(number, self._me, self._own_part(number))
            loop = asyncio.get_running_loop()
            timers += [loop.call_later(part * self.group.deadline_s, act) for part, act in attempt.deadlines]
            await asyncio.wait(tasks, timeout=_GIVE_UP * self.group.deadline_s)
        finally:
            for timer in timers:
                timer.cancel()
            attempt.end()  # settles all chunks, so that streams to other members end with what there is
            await _end(tasks)

    async def _own(self, attempt: DirectAttempt | GridAttempt) -> None:
        for number in attempt.own:
            data = await attempt.mean_of(number)
            if data is not None:
                self.results[number] = data
                self._counted[number] = self._bits(attempt.counted(number))

    async def _exchange(self, target: int, attempt: DirectAttempt | GridAttempt, index: int) -> None:
        """Send this member's parts or row means of the target's chunks, and receive the means."""
        opening = pb.ReduceOpen(group=self.group.id, phase=self.phase, attempt=index)
        numbers = attempt.targets[target]
        across = _across(attempt, target)
        try:
            async with self._network.reduce(self.group.members[target].record) as stream:
                await stream.send(pb.ReduceRequest(open=opening))
                if across is None:
                    sending = asyncio.create_task(self._send_parts(stream, numbers))
                else:
                    sending = asyncio.create_task(self._send_rows(stream, numbers, across))
                try:
                    for _ in numbers:
                        message = await stream.receive()
                        if message is None:
                            break
                        self._take_mean(message, numbers)
                        if across is not None:
                            counted = from_bits(self._counted[message.index], self._num_members)
                            across.take(message.index, message.data, counted)
                finally:
                    await _end([sending])
        except SwarmError:  # whatever the owner answers, the other owners' means still count
            self.broken.add(target)
        finally:
            if across is not None:
                across.close(target)

    async def _send_parts(self, stream: ReduceStream, numbers: Sequence[int]) -> None:
        with suppress(PeerUnavailable):  # the task that reads the stream notices too
            for number in numbers if self.group.members[self._me].weight else ():
                data = self._encode("part", number, self._part(number))
                await stream.send(pb.ReduceRequest(chunk=pb.Chunk(index=number, data=data)))
                self.bytes_sent += len(data)
            await stream.finish()

    async def _send_rows(self, stream: ReduceStream, numbers: Sequence[int], attempt: GridAttempt) -> None:
        with suppress(PeerUnavailable):
            for number in numbers:
                mean, weight = await attempt.row_mean(number)
                data = b"" if mean is None else self._encode("row", number, mean)
                counted = self._bits(attempt.counted_in_row(number))
                row = pb.RowMean(chunk=pb.Chunk(index=number, data=data, counted=counted), weight=weight)
                await stream.send(pb.ReduceRequest(row=row))
                self.bytes_sent += len(data)
            await stream.finish()

    def _take_mean(self, message: pb.Chunk, numbers: Iterable[int]) -> None:
        if message.index not in numbers or len(message.data) != self._size_bytes(message.index):
            raise RequestRejected("the owner has answered with another chunk, or with one of another size")
        if message.counted and not fits(message.counted, self._num_members):
            raise RequestRejected("the owner has counted members that the group does not have")
        self.results[message.index] = message.data
        # Older peers do not say which parts they counted. A group that continues takes over an earlier result, in which
        # none of its own parts are.
        unknown = () if self.group.continues else range(self._num_members)
        self._counted[message.index] = message.counted or self._bits(unknown)
        self.bytes_received += len(message.data)

    async def _take_parts(
        self, member: int, attempt: DirectAttempt | GridAttempt, stream: MessageStream[pb.Chunk, pb.ReduceRequest]
    ) -> None:
        across = _across(attempt, member)
        numbers = attempt.serves(member)
        try:
            while (message := await stream.receive()) is not None:
                chunk = message.chunk if across is None else message.row.chunk
                if message.WhichOneof("kind") != ("chunk" if across is None else "row") or chunk.index not in numbers:
                    return
                self.bytes_received += len(chunk.data)
                if across is None:
                    attempt.put(chunk.index, member, self._decode(chunk))
                else:
                    weight = message.row.weight
                    if chunk.counted and not fits(chunk.counted, self._num_members):
                        return
                    counted = from_bits(chunk.counted, self._num_members) if chunk.counted else None
                    across.put_row(chunk.index, member, self._decode(chunk) if weight else None, weight, counted)
        except (PeerUnavailable, ValueError):
            return  # the parts received so far count
        finally:
            attempt.leave_out(member)  # no more of its parts can come

    async def _fetch(self, holder: int, numbers: list[int]) -> None:
        request = pb.FetchRequest(group=self.group.id, phase=self.phase, chunks=numbers)
        try:
            async with asyncio.timeout(_GIVE_UP * self.group.deadline_s):
                async for message in self._network.fetch(self.group.members[holder].record, request):
                    self._take_mean(message, numbers)
        except (SwarmError, TimeoutError):
            self.broken.add(holder)

    def _part(self, number: int) -> Tensor:
        return self.vector[self.chunks[number].start : self.chunks[number].stop]

    def _size_bytes(self, number: int) -> int:
        return self._codec.size_bytes(self.chunks[number].stop - self.chunks[number].start)

    def _decode(self, chunk: pb.Chunk) -> Tensor:
        return self._codec.decode(chunk.data, self.chunks[chunk.index].stop - self.chunks[chunk.index].start)

    def _own_part(self, number: int) -> Tensor:
        """Return this member's own part of a chunk that it adds up. No codec changes the part."""
        part = self._part(number)
        return part if self._encoder is None else self._encoder.whole(self._place("part", number), part)

    def _encode(self, what: str, number: int, vector: Tensor) -> bytes:
        """Encode a chunk. ``what``: "part", "row" (the mean of a row) or "mean" (that of all members, which is the
        result unless it is redone)."""
        if self._encoder is None:
            return self._codec.encode(vector)
        place = self._place(what, number)
        if what != "part":
            self._settled.add(place)
        return self._encoder.encode(place, vector)

    def _place(self, what: str, number: int) -> ChunkPlace:
        return ChunkPlace(f"{what}/{self.phase}", self.chunks[number].start, self._length)

    def _bits(self, members: Collection[int]) -> bytes:
        return to_bits(members, self._num_members)


def _across(attempt: DirectAttempt | GridAttempt, member: int) -> GridAttempt | None:
    """Return the attempt if this peer and the member exchange row means, else None."""
    return attempt if isinstance(attempt, GridAttempt) and attempt.is_across(member) else None


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for result in await end_tasks(tasks):
        if isinstance(result, Exception):
            raise result
