"""The gRPC service of a stage peer for trainers: Forward, Backward and Commit of micro-batches.

A trainer without an answer asks another peer and never commits here, so that a lost answer counts for nothing. A commit
counts once however often it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import grpc
from torch import Tensor

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import AccessDenied, PeerUnavailable, RequestRejected
from swarm_protocol.rpc.serving import add_service, admitted
from swarm_training.core.moment import Moment
from swarm_training.stages.pb import stages_pb2 as pb
from swarm_training.stages.routing.speed import BACKWARD, FORWARD, SHARES
from swarm_training.stages.rpc.answers import replies_of
from swarm_training.stages.rpc.hosting import HostedStage, computed
from swarm_training.stages.rpc.room import RequestRoom, StageLimits
from swarm_training.stages.rpc.validation import RequestReader, check_micro_batch, moment_of, require_moment, tokens_of

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
IsFinite = Callable[[Moment, int, Tensor, Tensor], Awaitable[bool]]
_WRITE_S = 1.0  # the time to end a write after its call was cancelled


class StagesService:
    """The service of a stage peer for trainers."""

    def __init__(
        self,
        run: str,
        host: HostedStage,
        limits: StageLimits | None = None,
        access: AccessControl | None = None,
        note_answer: Callable[..., None] | None = None,
        banned: Callable[[], Collection[str]] = frozenset,
        is_finite: IsFinite | None = None,
    ) -> None:
        """Set up the service. ``run``: the run's name without the number of the stage. ``access``: that of a private
        run; None: all may train. ``note_answer``: see ``AnswerLog.note``; None: no audits. ``banned``: returns the ids
        of trainers to refuse. ``is_finite``: see ``Recomputing``; None: no report of non-finite answers is believed."""
        self._run = run
        self._host = host
        self._limits = limits or StageLimits()
        self._access = access
        self._note_answer = note_answer
        self._banned = banned
        self._is_finite = is_finite
        self._checking = asyncio.Lock()
        self._not_finite_at: Moment | None = None
        self.room = RequestRoom(self._limits)
        self._silences: dict[str, asyncio.TimerHandle] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started."""
        add_service(self, pb.DESCRIPTOR.services_by_name["Stages"], server)

    def close(self) -> None:
        for silence in self._silences.values():
            silence.cancel()
        self._silences.clear()

    async def Forward(self, requests: AsyncIterator[pb.ComputeRequest], context: _Context) -> None:
        await self._serve(requests, context, is_backward=False)

    async def Backward(self, requests: AsyncIterator[pb.ComputeRequest], context: _Context) -> None:
        await self._serve(requests, context, is_backward=True)

    async def Commit(self, request: pb.CommitRequest, context: _Context) -> pb.CommitReply:
        trainer = self._heard(context)
        check_micro_batch(request.micro_batch, self._run, self._host)
        which = request.micro_batch
        if request.is_not_finite:
            is_committed = await self._note_not_finite(trainer, request)
        else:
            # A call that was cancelled between the sums and their bit would leave a gradient that counts nowhere.
            is_committed = await asyncio.shield(self._host.peer.counting.commit(which.step, which.number, trainer))
        return pb.CommitReply(is_committed=is_committed)

    async def _note_not_finite(self, trainer: str, request: pb.CommitRequest) -> bool:
        """Check the report here before all stages go back, because anybody can send one.

        Raises RequestRejected if all answers for the micro-batch are finite, TimeoutError if that takes long.
        """
        which, most = request.micro_batch, self._limits.max_tokens
        if not self._host.stage.is_last:
            raise RequestRejected(f"stage {which.stage} was sent a report of infinite values: expected the last stage")
        with self.room.request(trainer) as reservation:
            ids, labels = (tokens_of(wire, reservation, most) for wire in (request.ids, request.labels))
            # One report is checked at a time, since each check makes all stages compute.
            async with asyncio.timeout(self._limits.read_s), self._checking:
                require_moment(which, self._host)
                moment = moment_of(which)
                if moment != self._not_finite_at:
                    if self._is_finite is None or await self._is_finite(moment, which.number, ids, labels):
                        raise RequestRejected(f"all answers for micro-batch {which.number} are finite, as found here")
                    require_moment(which, self._host)
                    self._not_finite_at = moment
        return self._host.peer.note_not_finite(which.step)

    async def _serve(self, requests: AsyncIterator[pb.ComputeRequest], context: _Context, *, is_backward: bool) -> None:
        trainer = self._heard(context)
        with self.room.request(trainer) as reservation:
            reader = RequestReader(self._host.stage, is_backward, reservation, self._limits.max_tokens)
            async with asyncio.timeout(self._limits.read_s):
                await self._read(requests, reader)
            tensors = await asyncio.to_thread(reader.tensors)
            reply = await self._compute(trainer, reader.work, tensors, is_backward)
            if self._note_answer is not None:
                await asyncio.to_thread(
                    self._note_answer, trainer, reader.work, tensors, reply, is_backward=is_backward
                )
        await _write(context, reply)
        self._heard(context)  # once more: the pass may have taken as long as silent trainers are waited for

    async def _read(self, requests: AsyncIterator[pb.ComputeRequest], reader: RequestReader) -> None:
        """Read the request. Raises what the reader raises."""
        is_first = True
        async for message in requests:
            if is_first != message.HasField("work"):
                raise RequestRejected("a call must have `work` in its first message, and in no later one")
            if is_first:
                check_micro_batch(message.work.micro_batch, self._run, self._host)
                reader.start(message.work)
            reader.take(message)
            is_first = False
        if is_first:
            raise RequestRejected("a call came without a message: expected one that says what to compute")

    async def _compute(
        self, trainer: str, work: pb.Work, tensors: dict[str, Tensor], is_backward: bool
    ) -> list[pb.ComputeReply]:
        host, which = self._host, work.micro_batch

        def run() -> list[pb.ComputeReply]:
            require_moment(which, host)  # once more: the peer may have stepped in between
            if is_backward and work.accumulates:
                host.sums.require_room(which.number, trainer)
            answer, gradients = computed(host.stage, work, tensors, is_backward)
            if gradients is not None and work.accumulates:
                host.peer.counting.add(which.step, which.number, trainer, gradients)
            return list(replies_of(answer, work.reply_form))

        is_all = is_backward and host.stage.is_last  # the last stage has the loss, and is asked for no forward pass
        return await host.peer.compute(run, 1.0 if is_all else SHARES[BACKWARD if is_backward else FORWARD])

    def _heard(self, context: _Context) -> str:
        """Return the trainer that calls. Raises AccessDenied if it may not."""
        trainer = admitted(context, self._access)
        if trainer in self._banned():
            raise AccessDenied(f"a moderator has banned {trainer} from the run")
        if trainer in self._silences:
            self._silences[trainer].cancel()
        loop = asyncio.get_running_loop()
        self._silences[trainer] = loop.call_later(self._limits.silence_s, self._is_gone, trainer)
        return trainer

    def _is_gone(self, trainer: str) -> None:
        del self._silences[trainer]
        # Another thread may hold the lock of the sums for long, while it adds a gradient.
        asyncio.get_running_loop().run_in_executor(None, self._host.sums.forget, trainer)


async def _write(context: _Context, replies: Iterable[pb.ComputeReply]) -> None:
    """Write the replies. A cancelled handler first ends its write, because grpc.aio cannot have a write cancelled."""
    for reply in replies:
        writing = asyncio.ensure_future(context.write(reply))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing], timeout=_WRITE_S)
            if writing.done() and not writing.cancelled():
                writing.exception()  # the error is read, so that asyncio does not log it
            raise
        except grpc.aio.BaseError as error:
            raise PeerUnavailable(f"the trainer is gone: {error}") from None
