"""The assembly of a session's steps from a stream's messages; each is checked before memory is reserved for it."""

from __future__ import annotations

from typing import Any

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.failures import Closing
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MAX_RESENT, MAX_RESENT_BYTES, MAX_RESENT_STEPS
from swarm_server.net.arrivals import Arrivals, ArrivingTensor, ByteReservation
from swarm_server.net.incoming import Incoming
from swarm_server.sessions.sessions import HostedSession

_STEP_BYTES = 1024  # that a step without data occupies in memory, in addition to its size on the wire


class StepReader(Closing):
    """The reader that assembles the steps of one stream. Its context drops a step that is incomplete at the end."""

    def __init__(self, hosted: HostedSession, arrivals: Arrivals, one_refusal: bool = False) -> None:
        """Create a reader. If ``one_refusal``, ignore the steps after a refused one until that step comes again."""
        self._hosted = hosted
        self._arrivals = arrivals
        self._one_refusal = one_refusal
        self._refused_number: int | None = None  # the step that must come again, see ``one_refusal``
        self._step: pb.Step | None = None  # the step whose hidden states are arriving
        self._arriving: ArrivingTensor | None = None
        self._refused = False  # more parts of a refused step will come

    @property
    def is_reading(self) -> bool:
        """Return whether more parts of a step are still to come."""
        return self._arriving is not None

    async def next(self, incoming: Incoming, idle_timeout_s: float | None) -> Any:
        """Return the next message; between steps, the stream may be silent, see ``Incoming.begin``."""
        return await (incoming.next() if self.is_reading else incoming.begin(idle_timeout_s))

    async def start(self, step: pb.Step) -> None:
        """Begin a step. Raise RequestRejected if the previous one is incomplete or the step's number is not allowed."""
        if self._arriving is not None:
            raise RequestRejected("a request came before all parts of the one before it")
        self._hosted.require_number(step.number)
        self._refused = self._refused_number is not None and step.number > self._refused_number
        if self._refused:
            return
        self._refused_number = None
        try:
            self._step, self._arriving = step, ArrivingTensor(self._arrivals, self._hosted.start(step))
        except (RequestRejected, PeerBusy) as error:
            await self._refuse(step, error)
            return
        await self._finish(step, self._arriving)

    async def more(self, part: bytes) -> None:
        """Add a part. Raise RequestRejected if no step has begun, or if more arrives than its header announced."""
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
            payload = arriving.tensor()
            self._step = self._arriving = None
            # Even if this stream ends, the step stays reserved in memory until it is computed.
            if not await self._hosted.step(step, payload, arriving.close):
                self._has_refused(step)

    async def _refuse(self, step: pb.Step, error: RequestRejected | PeerBusy) -> None:
        self._refused = True
        self._has_refused(step)
        await self._hosted.refuse(step.number, error)

    def _has_refused(self, step: pb.Step) -> None:
        if self._one_refusal:
            self._refused_number = step.number


async def read_resent(incoming: Incoming, first: pb.RerouteRequest, reservation: ByteReservation) -> list[pb.Step]:
    """Read and return the steps that a reroute resends, and count their memory in ``reservation``.

    Raises:
        RequestRejected: there are too many steps. PeerBusy: there is no room for them.
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
