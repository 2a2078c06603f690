"""Puts the steps of a session together from the messages of a stream, each checked before memory is taken for it."""

from __future__ import annotations

from typing import Any, Self

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MAX_RESENT, MAX_RESENT_BYTES, MAX_RESENT_STEPS
from swarm_server.net.arrivals import Arrivals, ArrivingTensor, Reservation
from swarm_server.net.incoming import Incoming
from swarm_server.sessions.sessions import HostedSession

_STEP_BYTES = 1024  # that a step without data takes besides those it was sent in


class StepReader:
    """Puts the steps of one stream together from their parts. A context manager: what is arriving goes with it."""

    def __init__(self, hosted: HostedSession, arrivals: Arrivals, one_refusal: bool = False) -> None:
        """``one_refusal``: what comes after a refused step builds on it, and is ignored until that step comes again."""
        self._hosted = hosted
        self._arrivals = arrivals
        self._one_refusal = one_refusal
        self._refused_number: int | None = None
        self._step: pb.Step | None = None  # whose hidden states are arriving
        self._arriving: ArrivingTensor | None = None
        self._refused = False  # parts of a refused step are still to come

    @property
    def is_reading(self) -> bool:
        """Parts of a step are still to come."""
        return self._arriving is not None

    async def next(self, incoming: Incoming, idle_timeout_s: float | None) -> Any:
        """The next message; between steps there may be silence, see ``Incoming.begin``."""
        return await (incoming.next() if self.is_reading else incoming.begin(idle_timeout_s))

    async def start(self, step: pb.Step) -> None:
        """Raises RequestRejected if the one before is not complete, or the step's number cannot be."""
        if self._arriving is not None:
            raise RequestRejected("a request came before all parts of the one before it")
        self._hosted.require_number(step.number)
        self._refused = self._refused_number is not None and step.number > self._refused_number
        if self._refused:
            return
        self._refused_number = None
        try:
            self._step, self._arriving = step, ArrivingTensor(self._arrivals, self._hosted.start(step), waits=True)
        except (RequestRejected, PeerBusy) as error:
            await self._refuse(step, error)
            return
        await self._finish(step, self._arriving)

    async def more(self, part: bytes) -> None:
        """Raises RequestRejected if no step has begun, or if more comes than was announced."""
        if self._refused:
            return
        if self._step is None or self._arriving is None:
            raise RequestRejected("a part of a tensor came without its beginning")
        self._hosted.heard()
        try:
            self._arriving.add(part)
        except PeerBusy as error:
            step = self._step
            self.close()
            await self._refuse(step, error)
            return
        await self._finish(self._step, self._arriving)

    def close(self) -> None:
        if self._arriving is not None:
            self._arriving.close()
        self._step = self._arriving = None

    async def _finish(self, step: pb.Step, arriving: ArrivingTensor) -> None:
        if arriving.complete:
            self._step = self._arriving = None
            # Even if this stream ends, the step waits, and counts, until it is computed.
            if not await self._hosted.step(step, arriving.tensor(), arriving.close):
                self._has_refused(step)

    async def _refuse(self, step: pb.Step, error: RequestRejected | PeerBusy) -> None:
        self._refused = True
        self._has_refused(step)
        await self._hosted.refuse(step.number, error)

    def _has_refused(self, step: pb.Step) -> None:
        if self._one_refusal:
            self._refused_number = step.number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


async def read_resent(incoming: Incoming, first: pb.RerouteRequest, reservation: Reservation) -> list[pb.Step]:
    """The steps that a reroute resends, which count in ``reservation``.

    Raises:
        RequestRejected: they are too many. PeerBusy: there is no room for them.
    """
    steps: list[pb.Step] = []
    size_bytes = 0
    message: pb.RerouteRequest | None = first
    while message is not None:
        if len(message.resend) > MAX_RESENT:
            raise RequestRejected(f"{len(message.resend)} steps are in one message: expected at most {MAX_RESENT}")
        message_bytes = message.ByteSize()
        reservation.take(message_bytes + _STEP_BYTES * len(message.resend))
        size_bytes += message_bytes
        steps += message.resend
        if len(steps) > MAX_RESENT_STEPS or size_bytes > MAX_RESENT_BYTES:
            raise RequestRejected(
                f"a reroute resends more than {MAX_RESENT_STEPS} steps or {MAX_RESENT_BYTES} bytes: expected that the "
                "client replays so many itself"
            )
        message = await incoming.next()
    return steps
