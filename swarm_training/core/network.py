"""The interface between peers and the network: a peer's calls to other peers, and its answers to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from swarm_training.core.record import Progress
from swarm_training.pb import training_pb2 as pb

Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)


class MessageStream(Protocol[Out, In]):
    """One side of an open stream."""

    async def send(self, message: Out) -> None:
        """Send a message. Raise PeerUnavailable if the stream is broken."""

    async def receive(self) -> In | None:
        """Return the next message; None if there will be no more. Raise PeerUnavailable if the stream is broken."""

    async def finish(self) -> None:
        """Announce that no more messages will be sent."""


MeetStream = MessageStream[pb.MeetRequest, pb.MeetReply]
ReduceStream = MessageStream[pb.ReduceRequest, pb.Chunk]


class Network(Protocol):
    """The calls to peers, which are named by records. All raise PeerUnavailable if the peer cannot be reached."""

    async def exchange(self, peer: Progress, request: pb.ExchangeRequest) -> pb.ExchangeReply: ...

    def meet(self, peer: Progress) -> AbstractAsyncContextManager[MeetStream]: ...

    def reduce(self, peer: Progress) -> AbstractAsyncContextManager[ReduceStream]: ...

    def fetch(self, peer: Progress, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]: ...

    def state(self, peer: Progress, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]: ...

    async def rounds(self, peer: Progress, request: pb.RoundsRequest) -> pb.RoundsReply: ...

    async def is_gone(self, peer: Progress) -> bool:
        """Return whether the peer's process has evidently ended: its host answers, but refuses connections."""


class PeerHandlers(Protocol):
    """The answers of a peer; ``peer_id`` is the id of the caller, which the network has authenticated."""

    async def exchange(self, peer_id: str, request: pb.ExchangeRequest) -> pb.ExchangeReply: ...

    async def meet(self, peer_id: str, stream: MessageStream[pb.MeetReply, pb.MeetRequest]) -> None: ...

    async def reduce(self, peer_id: str, stream: MessageStream[pb.Chunk, pb.ReduceRequest]) -> None: ...

    def fetch(self, peer_id: str, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]: ...

    def state(self, peer_id: str, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]: ...

    async def rounds(self, peer_id: str, request: pb.RoundsRequest) -> pb.RoundsReply: ...
