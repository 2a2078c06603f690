"""Members of a swarm without a network: each has some pieces, and a fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import Any

from swarm_models.sharing.download import OfferingMember
from swarm_models.sharing.manifest import HeldPieces, Manifest
from swarm_protocol.errors import PeerBusy, PeerUnavailable
from tests.unit.models.sharing.files import PIECE


async def in_thread(function: Any, *args: Any) -> Any:
    """At once: the clock of these tests does not wait for threads."""
    return function(*args)


class FakeMember:
    """Sends a piece in two parts, ``part_s`` each.

    Attributes:
        sent: the digests of the pieces that were asked for.
        fails_after: pieces, after which it is gone.
        hangs: it begins pieces and never ends them.
        lies: it sends other bytes.
        is_there: the swarm knows it.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        manifest: Manifest,
        *,
        part_s: float = 1.0,
        has: Collection[int] | None = None,
        fails_after: int | None = None,
        hangs: bool = False,
        lies: bool = False,
    ) -> None:
        self.peer_id, self.sent = name, list[bytes]()
        self.fails_after, self.hangs, self.lies, self.is_there = fails_after, hangs, lies, True
        self._part_s = part_s
        held = {file.key: range(len(file.pieces)) if has is None else has for file in manifest.files}
        self.offer = HeldPieces(manifest, {key: frozenset(indices) for key, indices in held.items()})
        self._content = {
            digest: (directory / file.name).read_bytes()[index * PIECE : (index + 1) * PIECE]
            for file in manifest.files
            for index, digest in enumerate(file.pieces)
        }

    async def read(self, digest: bytes) -> AsyncGenerator[bytes, None]:
        if self.fails_after is not None and len(self.sent) >= self.fails_after:
            raise PeerUnavailable("it is gone", self.peer_id)
        self.sent.append(digest)
        data = self._content[digest]
        if self.lies:
            data = data[:-1] + bytes([data[-1] ^ 1])
        for part in (data[: PIECE // 2], data[PIECE // 2 :]):
            await asyncio.sleep(1e9 if self.hangs else self._part_s)
            yield part

    def offering(self) -> OfferingMember:
        return OfferingMember(self.peer_id, self.offer, self.read)


def finder(*members: FakeMember) -> Any:
    """What finds those that are there."""

    async def find() -> list[OfferingMember]:
        return [member.offering() for member in members if member.is_there]

    return find


class DrippingMember(FakeMember):
    """Sends pieces and never ends them: nothing at all of them, but often.

    ``only``: those that somebody else was asked for; the others come at once.
    """

    def __init__(self, *args: Any, only: Sequence[bytes] | None = None, **faults: Any) -> None:
        super().__init__(*args, **faults)
        self._only = only

    async def read(self, digest: bytes) -> AsyncGenerator[bytes, None]:
        self.sent.append(digest)
        if self._only is not None and digest not in self._only:
            yield self._content[digest]
            return
        while True:
            await asyncio.sleep(9.0)
            yield b""


class CrowdedMember(FakeMember):
    """Has one place, which others have until ``free_s`` of the loop's clock."""

    free_s = 0.0
    num_taken = 0

    async def read(self, digest: bytes) -> AsyncGenerator[bytes, None]:
        if asyncio.get_running_loop().time() < self.free_s or self.num_taken:
            raise PeerBusy("there are 16 pieces of weights being sent already", self.peer_id)
        self.num_taken += 1
        try:
            async for part in super().read(digest):
                yield part
        finally:
            self.num_taken -= 1
