"""The adapters that a client adds to servers' blocks: snapshots for a pass or a session, and uploads to servers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from swarm_protocol.errors import CacheMiss
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter

T = TypeVar("T")
_MAX_UPLOADS = 4  # uploads of one adapter for one request, if the server forgets the adapter again and again
_REMEMBERED = 256  # remembered keys of adapters that a server was given; the server reports what it has forgotten


@dataclass(frozen=True)
class ActiveAdapter:
    """The current additions to remote blocks.

    Attributes:
        adapter: the client's own adapter; its tensors are the client's parameters.
        name: the name of an adapter that servers loaded at their start; empty if there is none.
        training: whether dropout is applied, where the adapter has any.
    """

    adapter: Adapter = field(default_factory=lambda: Adapter(b""))
    name: str = ""
    training: bool = False

    def over(self, span: Span) -> ActiveAdapter:
        """Return the additions to these blocks."""
        return replace(self, adapter=self.adapter.over(span))

    @property
    def drops(self) -> bool:
        return self.training and any(part.dropout for part in self.adapter.low_rank)

    def snapshot(self) -> AdapterSnapshot:
        """Return a copy of the current values, which later steps of an optimizer do not change."""
        return AdapterSnapshot(self)


@dataclass(frozen=True)
class AdapterPart:
    """The part of an adapter that lies in one server's blocks.

    Attributes:
        name: the name by which requests refer to the part.
        data: the serialised part; None if servers already have it under its name.
        shapes: the shapes of the gradients that come back for the part.
    """

    name: pb.AdapterName
    data: bytes | None = None
    shapes: tuple[torch.Size, ...] = ()


class AdapterSnapshot:
    """A snapshot of an adapter at one moment, in parts for servers.

    Attributes:
        name: the name of the adapter that servers loaded at their start; empty if there is none.
    """

    def __init__(self, added: ActiveAdapter | None = None) -> None:
        self.name = "" if added is None else added.name
        self._adapter = Adapter(b"") if added is None else _copied(added.adapter)
        self._parts: dict[Span, AdapterPart | None] = {}

    def part(self, span: Span) -> AdapterPart | None:
        """Return the part in these blocks; None if nothing is added to them."""
        if self.name:  # then the client adds nothing of its own to the blocks
            return AdapterPart(pb.AdapterName(name=self.name))
        if span not in self._parts:
            adapter, part = self._adapter.over(span), None
            if not adapter.is_empty:
                data, key = adapter.serialize()
                part = AdapterPart(pb.AdapterName(key=key), data, tuple(tensor.shape for tensor in adapter.tensors))
            self._parts[span] = part
        return self._parts[span]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors, on the CPU in float32."""
        return self._adapter.tensors

    def begins(self, span: Span) -> int:
        """Return the first block of ``span`` that has a tensor with a gradient; the span's end if there is none."""
        over = self._adapter.over(span)
        blocks = [*(part.block for part in over.low_rank), *(prompt.block for prompt in over.prompts)]
        return min([span.end, *blocks])

    def sums(self, span: Span) -> AdapterGradients:
        """Return sums for the gradients of the tensors over ``span``, in the order of the tensors."""
        return AdapterGradients(self._adapter.over(span))


NOTHING = AdapterSnapshot()


class AdapterGradients:
    """The sums of an adapter's gradients, which come from several servers and micro-batches."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        places = [(part.block, part.module, name) for part in adapter.low_rank for name in ("a", "b")]
        places += [(prompt.block, "", "prompt") for prompt in adapter.prompts]
        self._sums = {place: torch.zeros_like(t) for place, t in zip(places, adapter.tensors, strict=True)}

    def add(self, span: Span, grads: list[torch.Tensor]) -> None:
        """Add the gradients of the tensors in ``span``, in the order of the tensors."""
        over = [place for place in self._sums if place[0] in span]
        for place, grad in zip(over, grads, strict=True):
            self._sums[place] += grad

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._sums.values())


class AdapterUploader:
    """The uploads of adapters to one server over one connection."""

    def __init__(self, put: Callable[[bytes, Span], Awaitable[None]]) -> None:
        self._put = put
        self._given: OrderedDict[bytes, None] = OrderedDict()
        self._giving = asyncio.Lock()

    async def use(
        self, part: AdapterPart | None, span: Span, request: Callable[[pb.AdapterName | None], Awaitable[T]]
    ) -> T:
        """Upload the part if needed, and make a request that names it; upload it again if the server has forgotten it.

        Raises:
            CacheMiss: the server forgets the part every time, or never had this name. Errors of ``request`` also pass.
        """
        if part is None or part.data is None:
            return await request(None if part is None else part.name)
        for attempt in range(_MAX_UPLOADS):
            async with self._giving:  # micro-batches that start together must not each upload the part
                if part.name.key not in self._given:
                    await self._put(part.data, span)
                    self._given[part.name.key] = None
                    if len(self._given) > _REMEMBERED:
                        self._given.popitem(last=False)
            try:
                return await request(part.name)
            except CacheMiss:
                self._given.pop(part.name.key, None)
                if attempt == _MAX_UPLOADS - 1:
                    raise
        raise AssertionError


def _copied(adapter: Adapter) -> Adapter:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", torch.float32, copy=True)

    return replace(
        adapter,
        low_rank=tuple(replace(part, a=copy(part.a), b=copy(part.b)) for part in adapter.low_rank),
        prompts=tuple(replace(prompt, values=copy(prompt.values)) for prompt in adapter.prompts),
    )
