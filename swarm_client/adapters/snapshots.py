"""What a client adds to the blocks of others: how it is kept for a pass or a session, and given to servers."""

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
_MAX_UPLOADS = 4  # of one adapter for one request, by servers that forget it again and again
_REMEMBERED = 256  # keys that a server was given; what it forgets, it says


@dataclass(frozen=True)
class Added:
    """What is added to remote blocks at present.

    Attributes:
        adapter: the client's own, whose tensors are its parameters.
        name: of an adapter that servers loaded at their start; empty: none.
        training: elements are dropped, where the adapter says so.
    """

    adapter: Adapter = field(default_factory=lambda: Adapter(b""))
    name: str = ""
    training: bool = False

    def over(self, span: Span) -> Added:
        """What of it lies in these blocks."""
        return replace(self, adapter=self.adapter.over(span))

    @property
    def drops(self) -> bool:
        return self.training and any(part.dropout for part in self.adapter.low_rank)

    def snapshot(self) -> Snapshot:
        """As it is now, whatever an optimizer does to the parameters later."""
        return Snapshot(self)


@dataclass(frozen=True)
class Part:
    """What of an adapter lies in one server's blocks.

    Attributes:
        name: by which requests mean it.
        data: serialised; None: servers have it under its name.
        shapes: of the gradients that come back for it.
    """

    name: pb.AdapterName
    data: bytes | None = None
    shapes: tuple[torch.Size, ...] = ()


class Snapshot:
    """An adapter as it was at one moment, in parts for servers."""

    def __init__(self, added: Added | None = None) -> None:
        self._name = "" if added is None else added.name
        self._adapter = Adapter(b"") if added is None else _copied(added.adapter)
        self._parts: dict[Span, Part | None] = {}

    def part(self, span: Span) -> Part | None:
        """None: nothing is added to these blocks."""
        if self._name:
            return Part(pb.AdapterName(name=self._name))
        if span not in self._parts:
            self._parts[span] = _part(self._adapter.over(span))
        return self._parts[span]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, on the CPU."""
        return self._adapter.tensors

    def begins(self, span: Span) -> int:
        """The first block of ``span`` that has a tensor with a gradient; the end of the span if there is none."""
        over = self._adapter.over(span)
        blocks = [*(part.block for part in over.low_rank), *(prompt.block for prompt in over.prompts)]
        return min([span.end, *blocks])

    def sums(self, span: Span) -> GradientSums:
        """For gradients of the tensors over ``span``, in their order."""
        return GradientSums(self._adapter.over(span))


NOTHING = Snapshot()


class GradientSums:
    """Gradients of an adapter's tensors, which come from several servers and micro-batches."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        places = [(part.block, part.module, name) for part in adapter.low_rank for name in ("a", "b")]
        places += [(prompt.block, "", "prompt") for prompt in adapter.prompts]
        self._sums = {place: torch.zeros_like(t) for place, t in zip(places, adapter.tensors, strict=True)}

    def add(self, span: Span, grads: list[torch.Tensor]) -> None:
        """Those of what lies in ``span``, in its order."""
        over = [place for place in self._sums if place[0] in span]
        for place, grad in zip(over, grads, strict=True):
            self._sums[place] += grad

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._sums.values())


class AdapterUploader:
    """The adapters that one server was given over one connection."""

    def __init__(self, put: Callable[[bytes, Span], Awaitable[None]]) -> None:
        self._put = put
        self._given: OrderedDict[bytes, None] = OrderedDict()
        self._giving = asyncio.Lock()

    async def give(self, part: Part | None, span: Span) -> None:
        """Before it is needed, unless the server has it. Raises what the connection does."""

        async def nothing(_name: pb.AdapterName | None) -> None: ...

        await self.use(part, span, nothing)

    async def use(self, part: Part | None, span: Span, request: Callable[[pb.AdapterName | None], Awaitable[T]]) -> T:
        """Makes a request that names the part, which the server is given before, and again if it has forgotten it.

        Raises:
            CacheMiss: it forgets it every time, or never had one of this name; and what ``request`` raises.
        """
        if part is None or part.data is None:
            return await request(None if part is None else part.name)
        for attempt in range(_MAX_UPLOADS):
            async with self._giving:
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


def _part(adapter: Adapter) -> Part | None:
    if adapter.is_empty:
        return None
    data, key = adapter.serialize()
    return Part(pb.AdapterName(key=key), data, tuple(tensor.shape for tensor in adapter.tensors))
