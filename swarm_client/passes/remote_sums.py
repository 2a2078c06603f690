"""Sums of an adapter's gradients over several micro-batches. Servers add them up, so that each sum travels once.

A server may forget a sum, or die with it. The client therefore keeps what it needs to repeat the backward passes until
it has received the sum.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_client.adapters.snapshots import AdapterPart, AdapterSnapshot
from swarm_client.passes.ways import Visited, Way
from swarm_client.routing.routing import Hop
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import MAX_SUMMANDS

_KEY_BYTES = 16


@dataclass(frozen=True)
class SummedPass:
    """A backward pass whose gradients are in the sum, with all that is needed to repeat it."""

    part: Visited
    grad: WireTensor  # of the outputs
    context: Context


class RemoteSum:
    """The sum on one server over all micro-batches that go back through the same blocks there."""

    def __init__(self, hop: Hop, adapter: AdapterPart, num_passes: int) -> None:
        self.hop = hop
        self.adapter = adapter
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._added: dict[int, SummedPass] = {}
        self._num_missing = num_passes
        self._complete = asyncio.Event()

    def summand(self, number: int) -> Summand:
        return Summand(self, number, pb.Summand(key=self._key, number=number))

    def request(self) -> pb.TakeSum:
        """Return the request for the sum. ``ServerConnection.take_sum`` adds the contract."""
        return pb.TakeSum(key=self._key, numbers=sorted(self._added))

    def ended(self, number: int, added: SummedPass | None) -> None:
        """Record the end of one pass, with ``added`` if its gradients are in the sum."""
        if added is not None:
            self._added[number] = added
        self._num_missing -= 1
        if not self._num_missing:
            self._complete.set()

    async def complete(self) -> list[SummedPass]:
        """Wait until all passes have ended; return those in the sum, in the order of rows."""
        await self._complete.wait()
        return [self._added[number] for number in sorted(self._added)]


@dataclass(frozen=True)
class Summand:
    """The place of one backward pass in a sum."""

    sum: RemoteSum
    number: int
    name: pb.Summand

    def ended(self, added: SummedPass | None) -> None:
        self.sum.ended(self.number, added)


class RemoteSums:
    """The sums of one batch's backward pass.

    Attributes:
        sums: the sums on servers that more than one micro-batch goes back through.
    """

    def __init__(self, ways: Sequence[Way], adapter: AdapterSnapshot, first_block: int) -> None:
        """Plan the sums. ``first_block``: the block at which the backward pass ends."""
        together: dict[tuple[str, Span], list[Visited]] = defaultdict(list)
        for part in (part for way in ways for part in way.path if part.hop.span.end > first_block):
            together[part.hop.server.peer_id, part.hop.span].append(part)
        self.sums: list[RemoteSum] = []
        self._summands: dict[int, Summand] = {}  # keys: ids of the ``Visited`` objects
        for (_, span), parts in together.items():
            of_server = adapter.part(span)
            if of_server is not None and of_server.shapes and 1 < len(parts) <= MAX_SUMMANDS:
                sum_ = RemoteSum(parts[0].hop, of_server, len(parts))
                self.sums.append(sum_)
                self._summands.update((id(part), sum_.summand(number)) for number, part in enumerate(parts))

    def summand(self, part: Visited) -> Summand | None:
        """Return the place in a sum; None if the server sends this pass's gradients directly."""
        return self._summands.get(id(part))
