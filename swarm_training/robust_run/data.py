"""The tensors of a step on the network: served by their hashes, fetched from peers, and passed to the workbench."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_training.core.robust_config import Deadlines, RobustConfig
from swarm_training.core.robust_network import RobustNetwork
from swarm_training.robust.attempt import AttemptState
from swarm_training.robust.instructions import StepRecord
from swarm_training.robust.jury import evidence
from swarm_training.robust.messages import (
    AggregateOpened,
    BroadcastMessage,
    Event,
    EvidenceOpened,
    FalseGradient,
    Item,
    PartsOpened,
)
from swarm_training.robust.workbench import Delivery, Workbench

Found = Coroutine[Any, Any, list[Event]]
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
_RETRY_S = 0.2
_WAIT_S = 5.0  # other peers may ask for data before it is here
_ELEMENT_BYTES = 4


@dataclass
class _Blob:
    data: bytes
    readers: frozenset[str] | None  # None: all peers
    step: int


class Blobs:
    """A store of data by SHA-256: parts, aggregates, states. Some entries are for certain peers only."""

    def __init__(self) -> None:
        self._blobs: dict[bytes, _Blob] = {}
        self._changed = asyncio.Condition()

    async def put(self, data: bytes, step: int, readers: Iterable[str] | None = None) -> bytes:
        """Store data and return its digest. ``readers``: more peers that may read the data; None: all peers."""
        digest = hashlib.sha256(data).digest()
        async with self._changed:
            known = self._blobs.get(digest)
            allowed = None if readers is None else frozenset(readers)
            if known is not None:
                allowed = None if allowed is None or known.readers is None else allowed | known.readers
                step = max(step, known.step)
            self._blobs[digest] = _Blob(data, allowed, step)
            self._changed.notify_all()
        return digest

    def get(self, digest: bytes) -> bytes | None:
        blob = self._blobs.get(digest)
        return None if blob is None else blob.data

    async def read(self, digest: bytes, reader: str) -> bytes:
        """Return data, once it is here. Raises RequestRejected if it does not come soon, or is for other peers."""
        try:
            async with asyncio.timeout(_WAIT_S), self._changed:
                await self._changed.wait_for(lambda: self._may_read(digest, reader))
        except TimeoutError:
            raise RequestRejected("this peer does not have the data, or it is for others") from None
        return self._blobs[digest].data

    def forget(self, before_step: int) -> None:
        self._blobs = {digest: blob for digest, blob in self._blobs.items() if blob.step >= before_step}

    def _may_read(self, digest: bytes, reader: str) -> bool:
        blob = self._blobs.get(digest)
        return blob is not None and (blob.readers is None or reader in blob.readers)


class StepData:
    """One peer's exchange of a step's data. The workbench is used by one call at a time, in a thread."""

    def __init__(
        self, bench: Workbench, num_elements: int, network: RobustNetwork, config: RobustConfig, in_thread: InThread
    ) -> None:
        self.bench = bench
        self.blobs = Blobs()
        self._max_bytes = num_elements * _ELEMENT_BYTES
        self._network = network
        self._config = config
        self._in_thread = in_thread
        self._using = asyncio.Lock()

    async def on_bench(self, call: Callable[[], Any]) -> Any:
        async with self._using:
            return await self._in_thread(call)

    async def give(self, delivery: Delivery) -> BroadcastMessage | None:
        """Let other peers fetch a delivery's data. Return its message, if any, with the digests of that data."""
        readers = None if delivery.to is None else {delivery.to}
        step = max([delivery.place[0], *(item.step for item in delivery.parts)])
        digests = [await self.blobs.put(to_bytes(part), step + 1, readers) for part in delivery.parts.values()]
        if delivery.aggregate is not None:
            await self.blobs.put(to_bytes(delivery.aggregate), step + 1)
        message = delivery.message
        if isinstance(message, PartsOpened | EvidenceOpened):
            return type(message)(message.sender, message.step, message.attempt, message.items, tuple(digests))
        return message

    def parts_for(self, me: str, known: AttemptState) -> list[Found]:
        """Return coroutines that fetch the parts that other workers have committed for this peer."""
        current, place = known.round, (known.round.step, known.round.attempt)
        mine = current.owners.index(me)
        wanted = {worker: Item(*place, worker, me) for worker in current.workers if worker != me}
        return [
            self._soon("receipt", self.take_parts(worker, {item: known.commitments[worker][mine]}, place))
            for worker, item in wanted.items()
        ]

    def aggregates(self, me: str, known: AttemptState, holders: Iterable[str]) -> list[Found]:
        """Return coroutines that fetch the aggregates of other owners, from the owner or else from any holder."""
        place, names = (known.round.step, known.round.attempt), [name for name in holders if name != me]
        digests = {owner: known.committed_aggregates[owner] for owner in known.round.owners if owner != me}
        return [
            self._soon("reveal", self.take_aggregate(owner, digest, names, place)) for owner, digest in digests.items()
        ]

    def audited(self, target: str, last: StepRecord) -> Found:
        """Return a coroutine that fetches the parts of the last step that this peer must audit."""
        items = evidence(FalseGradient(target), last.round, last)
        parts = dict(zip(items, last.commitments.get(target, ()), strict=False))
        place = last.round.step, last.round.attempt
        return self._soon("commitment", self.take_parts(target, parts, place))

    async def _soon(self, kind: str, found: Found) -> list[Event]:
        """Return the events of ``found``; none if it takes longer than a phase of this kind."""
        deadlines = Deadlines.of(kind, self._config, self._max_bytes // _ELEMENT_BYTES)
        try:
            async with asyncio.timeout(deadlines.deadline_s):
                return await found
        except TimeoutError:
            return []

    async def take_parts(self, worker: str, parts: Mapping[Item, bytes], place: tuple[int, int]) -> list[Event]:
        """Fetch parts from their worker, with retries until all are there. ``parts``: digests by item."""
        found = {item: await self.fetch(digest, [worker]) for item, digest in parts.items()}
        tensors = {item: to_tensor(data) for item, data in found.items()}
        return await self._received(Delivery(worker, place, parts=tensors))

    async def take_aggregate(
        self, owner: str, digest: bytes, holders: Iterable[str], place: tuple[int, int]
    ) -> list[Event]:
        data = await self.fetch(digest, [owner, *holders])
        await self.blobs.put(data, place[0] + 1)  # other peers may ask this one, if the owner withholds it
        return await self._received(Delivery(owner, place, aggregate=to_tensor(data)))

    async def take_message(self, message: BroadcastMessage) -> list[Event]:
        """Return the events of a message whose phase is over. Its data was fetched before the message was taken."""
        place = message.step, message.attempt
        if isinstance(message, PartsOpened | EvidenceOpened):
            data = [self.blobs.get(digest) for digest in message.digests]
            pairs = zip(message.items, data, strict=False)
            parts = {item: to_tensor(each) for item, each in pairs if each is not None}
            return await self._received(Delivery(message.sender, place, message=message, parts=parts))
        if isinstance(message, AggregateOpened) and (found := self.blobs.get(message.digest)) is not None:
            return await self._received(Delivery(message.sender, place, message=message, aggregate=to_tensor(found)))
        return self.bench.receive(Delivery(message.sender, place, message=message))

    async def take_own(self, delivery: Delivery) -> list[Event]:
        parts, aggregate = delivery.parts, delivery.aggregate
        return await self._received(Delivery(delivery.sender, delivery.place, parts=parts, aggregate=aggregate))

    async def fetch(self, digest: bytes, holders: Iterable[str]) -> bytes:
        """Fetch data from any of the holders, with endless retries: the caller limits the time."""
        names = list(holders)
        while True:
            if (known := self.blobs.get(digest)) is not None:
                return known
            for holder in names:
                if (data := await self.fetch_once(digest, holder)) is not None:
                    return data
            await asyncio.sleep(_RETRY_S)

    async def fetch_once(self, digest: bytes, holder: str) -> bytes | None:
        """Fetch data from one holder. Return None if the holder gives nothing, or other data."""
        seconds = self._config.phase_s + self._max_bytes / self._config.bytes_per_s
        try:
            async with asyncio.timeout(seconds):
                data = await self._network.fetch(holder, digest, self._max_bytes)
        except (SwarmError, TimeoutError):
            return None
        is_right = await self._in_thread(lambda: hashlib.sha256(data).digest()) == digest
        return data if is_right and len(data) % _ELEMENT_BYTES == 0 else None

    async def _received(self, delivery: Delivery) -> list[Event]:
        events: list[Event] = await self.on_bench(lambda: self.bench.receive(delivery))
        return events


def to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


def to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)
