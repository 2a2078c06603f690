"""Sessions as peers see them: steps arrive from the client or the hop before, outputs go to the client or the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from swarm_protocol.block_input import BlockInput
from swarm_protocol.codec import Assembler, encode
from swarm_protocol.errors import PeerBusy, RequestRejected, SessionLost
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_server.engine import Change, Crop, Engine, RecordPast, Reorder, Session, Step
from swarm_server.kv_cache import CacheBudget
from swarm_server.push import Neighbours, Pusher
from swarm_server.scheduler import Scheduler
from swarm_server.validation import Rules

MIN_KEY_BYTES = 16
Reply = Callable[[list[pb.SessionReply]], Awaitable[None]]


@dataclass
class Host:
    """What all sessions of one server share."""

    engine: Engine
    scheduler: Scheduler
    budget: CacheBudget
    rules: Rules
    neighbours: Neighbours
    max_sessions: int

    def __post_init__(self) -> None:
        self._sessions: dict[bytes, HostedSession] = {}

    def open(self, request: pb.Open, client: str, reply: Reply) -> HostedSession:
        """A session, which must be closed.

        Raises:
            PeerMoved, RequestRejected: see ``Rules``.
            PeerBusy: there is no room.
        """
        blocks = self.rules.blocks(request.contract)
        batch_size = self.rules.batch_size(request.batch_size)
        self.rules.length(request.reserve_tokens)
        if len(request.session_key) < MIN_KEY_BYTES:
            raise RequestRejected(f"the session key has {len(request.session_key)} bytes: expected {MIN_KEY_BYTES}")
        if request.session_key in self._sessions:
            raise RequestRejected("a session with this key is open already")
        if len(self._sessions) >= self.max_sessions:
            raise PeerBusy(f"the server has {self.max_sessions} sessions already")
        keeps_outputs = request.HasField("next")
        layout = self.engine.layout_of(blocks, keeps_outputs)
        lease = self.budget.lease(client, batch_size * layout.size_bytes(request.reserve_tokens))
        session = self.engine.open(
            blocks, batch_size, lease, reserved=request.reserve_tokens, keeps_outputs=keeps_outputs
        )
        hosted = HostedSession(self, request, blocks, session, reply)
        self._sessions[request.session_key] = hosted
        return hosted

    def find(self, session_key: bytes) -> HostedSession:
        """Raises SessionLost if there is none."""
        try:
            return self._sessions[session_key]
        except KeyError:
            raise SessionLost("this server does not know the session") from None

    async def forget(self, hosted: HostedSession) -> None:
        del self._sessions[hosted.key]
        try:
            await self.scheduler.call(lambda: self.engine.close(hosted.session))
        except PeerBusy:  # the server ends
            hosted.session.lease.close()


class HostedSession:
    """One session on the wire. A refused step leaves it as it was."""

    def __init__(self, host: Host, request: pb.Open, blocks: Span, session: Session, reply: Reply) -> None:
        self.key = request.session_key
        self.session = session
        self._host = host
        self._blocks = blocks
        self._reply = reply
        self._codec = request.codec
        self._last_number = 0
        self._turn = asyncio.Lock()  # steps may come from the client and from the hop before
        self._closed = False
        self._last_time = time.monotonic()
        self._pusher = None
        if request.HasField("next"):
            self._pusher = Pusher(host.neighbours, request.next, self._relay)

    @property
    def silent_s(self) -> float:
        """How long nothing has come for the session."""
        return 0.0 if self._turn.locked() else time.monotonic() - self._last_time

    async def announce(self) -> None:
        """Tells the client that the session is open."""
        host = self._host
        opened = pb.Opened(tokens_left=host.budget.tokens_left, max_step_tokens=host.rules.max_step_tokens)
        await self._reply([pb.SessionReply(opened=opened)])

    async def step(self, request: pb.Step, hidden: torch.Tensor) -> None:
        """Computes the step and sends its outputs on, or tells the client why not.

        A step that has begun is finished even if the stream it came through breaks: it may come again through another,
        and must be known then.
        """
        finishing = asyncio.ensure_future(self._finish(request, hidden))
        finishing.add_done_callback(_heed)
        await asyncio.shield(finishing)

    async def _finish(self, request: pb.Step, hidden: torch.Tensor) -> None:
        async with self._turn:
            if self._closed or request.number <= self._last_number:
                return
            try:
                step = self._checked(request, hidden)
                output = await self._host.scheduler.step(self.session, step)
            except (RequestRejected, PeerBusy) as error:
                await self.refuse(request.number, error)
                return
            finally:
                self._last_time = time.monotonic()
            self._last_number = request.number
            await self._send(request, output)

    async def refuse(self, number: int, error: RequestRejected | PeerBusy) -> None:
        failure = pb.Failure(status=error.status.value[0], message=str(error), number=number)
        await self._reply([pb.SessionReply(failure=failure)])

    async def close(self) -> None:
        self._closed = True
        if self._pusher is not None:
            await self._pusher.close()
        await self._host.forget(self)

    def start(self, step: pb.Step) -> Assembler:
        """Checks a step's header before memory is taken for its hidden states."""
        rules = self._host.rules
        arriving = rules.new_positions(step.hidden, past=step.start_position)
        rules.step_tokens(*arriving.shape[:2])
        return arriving

    def _checked(self, request: pb.Step, hidden: torch.Tensor) -> Step:
        rules, (batch_size, num_tokens, _) = self._host.rules, hidden.shape
        mask = positions = None
        if request.HasField("attention_mask"):
            mask = rules.mask(request.attention_mask, batch_size, request.start_position + num_tokens)
        if request.HasField("position_ids"):
            positions = rules.positions(request.position_ids, batch_size, num_tokens)
        num_wanted = request.outputs_wanted if request.HasField("outputs_wanted") else num_tokens
        if num_wanted > num_tokens:
            raise RequestRejected(f"{num_wanted} outputs are wanted of a step of {num_tokens} positions")
        changes = tuple(map(self._change, request.changes))
        end = request.start_position + num_tokens
        lease, layout = self.session.lease, self.session.layout
        if end > self.session.reserved:
            lease.promise(batch_size * layout.size_bytes(end))
        return Step(request.start_position, BlockInput(hidden, mask, positions), changes, num_wanted)

    def _change(self, change: pb.Change) -> Change:
        kind = change.WhichOneof("kind")
        if kind == "reorder":
            self._host.rules.batch_size(len(change.reorder.indices))
            return Reorder(tuple(change.reorder.indices))
        if kind == "crop":
            return Crop(change.crop.length)
        if kind == "record_past":
            return RecordPast()
        raise RequestRejected("a change of unknown kind")

    async def _send(self, request: pb.Step, output: torch.Tensor) -> None:
        if self._pusher is not None:
            header, parts = encode(output, self._codec)
            await self._pusher.send(_with_hidden(request, header), parts)
            return
        num_wanted = request.outputs_wanted if request.HasField("outputs_wanted") else output.shape[1]
        if not num_wanted:
            await self._reply([pb.SessionReply(output=pb.Output(number=request.number))])
            return
        header, parts = encode(output[:, -num_wanted:], self._codec)
        await self._reply_output(pb.Output(number=request.number, hidden=header), parts)

    async def _relay(self, step: pb.Step, parts: list[bytes]) -> None:
        await self._reply_output(pb.Output(number=step.number, hidden=step.hidden, relay=True), parts)

    async def _reply_output(self, output: pb.Output, parts: list[bytes]) -> None:
        await self._reply([pb.SessionReply(output=output), *(pb.SessionReply(more=part) for part in parts)])


class StepReader:
    """Puts the steps of one stream together from their parts."""

    def __init__(self, hosted: HostedSession) -> None:
        self._hosted = hosted
        self._step: pb.Step | None = None  # whose hidden states are arriving
        self._arriving: Assembler | None = None
        self._refused = False  # parts of a refused step are still to come

    @property
    def is_reading(self) -> bool:
        """Parts of a step are still to come."""
        return self._arriving is not None

    async def start(self, step: pb.Step) -> None:
        """Raises RequestRejected if the one before is not complete."""
        if self._arriving is not None:
            raise RequestRejected("a request came before all parts of the one before it")
        self._refused = False
        try:
            self._step, self._arriving = step, self._hosted.start(step)
        except RequestRejected as error:
            self._refused = True
            await self._hosted.refuse(step.number, error)
            return
        await self._finish()

    async def more(self, part: bytes) -> None:
        """Raises RequestRejected if no step has begun, or if more comes than was announced."""
        if self._refused:
            return
        if self._arriving is None:
            raise RequestRejected("a part of a tensor came without its beginning")
        self._arriving.add(part)
        await self._finish()

    async def _finish(self) -> None:
        if self._arriving.complete:
            step, hidden = self._step, self._arriving.tensor()
            self._step = self._arriving = None
            await self._hosted.step(step, hidden)


def _heed(task: asyncio.Task) -> None:
    """Whoever waits for the task gets its error; if nobody does any more, nobody needs it."""
    if not task.cancelled():
        task.exception()


def _with_hidden(step: pb.Step, hidden: pb.Tensor) -> pb.Step:
    """The same step for the next hop."""
    return pb.Step(
        number=step.number,
        changes=step.changes,
        start_position=step.start_position,
        hidden=hidden,
        attention_mask=step.attention_mask if step.HasField("attention_mask") else None,
        position_ids=step.position_ids if step.HasField("position_ids") else None,
        outputs_wanted=step.outputs_wanted if step.HasField("outputs_wanted") else None,
    )
