"""A session's chain of servers: steps go in, answers come out, and hops that fail or leave are replaced."""

from __future__ import annotations

import asyncio
import sys
from collections import deque

import torch

from swarm_client.adapters.snapshots import Snapshot
from swarm_client.core.background import now_s
from swarm_client.core.events import Reporter
from swarm_client.sessions.call import Call
from swarm_client.sessions.failover import Failover, HopsFailed, StartOver
from swarm_client.sessions.opening import Opener, Opening, close
from swarm_client.sessions.recovery import Taken
from swarm_client.sessions.standby import StandbyReplicas
from swarm_client.swarm.swarm import Swarm, closed_error
from swarm_client.transport.hops import Answer, BlockAnswer, HopEvent, HopSession, Inbox, Trouble
from swarm_client.transport.steps import OutgoingStep, chunk_size, split
from swarm_client.transport.wire_tensor import CODECS
from swarm_protocol.errors import (
    AccessDenied,
    BadReply,
    PeerBusy,
    PeerError,
    PeerUnavailable,
    SwarmError,
)
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import FIRST_STEP

_PAST_STEPS = 256  # that a copy may lag behind
_SPARE_TOKENS = 64  # positions per row that are asked for besides
_MAX_REFUSALS = 3  # of one call's steps by servers that blame the one before


class Chain:
    """The hops of one session. Runs on the background loop; one call at a time.

    Attributes:
        records_past: sliding windows keep what later crops need.
        number: of the last step; ``past``: the steps before the call under way.
        is_new: what came before the next call has not been sent to any server yet.
        progress_s: when the call last got on.
        busy: held during a call.
    """

    def __init__(
        self,
        swarm: Swarm,
        blocks: Span,
        max_positions: int | None,
        reserve_tokens: int,
        standby: bool,
        reporter: Reporter,
    ) -> None:
        self.hops: list[HopSession] = []
        self.records_past = False
        self.number = FIRST_STEP - 1
        self.is_new = False
        self._swarm = swarm
        self._max_positions = max_positions
        self._reserve_tokens = reserve_tokens
        self._inbox = Inbox()
        self._opener = opener = Opener(swarm, self._inbox)
        self._copies = StandbyReplicas(self, swarm, opener, standby, reporter)
        self._inbox.on_leaving = self._copies.hop_leaves
        self._failover = Failover(self, swarm, blocks, opener, self._copies, reporter)
        self.past: deque[Taken] = deque(maxlen=_PAST_STEPS)
        self._refused: int | None = None  # a step that the first hop has refused
        self._probing: asyncio.Task[None] | None = None
        self._asked_s: float | None = None  # when servers were first asked for room
        self.progress_s = 0.0
        self.busy = asyncio.Lock()
        swarm.sessions.add(self)

    @property
    def adapter(self) -> Snapshot:
        """What is added to the blocks, from when the next hops are opened."""
        return self._opener.adapter

    @adapter.setter
    def adapter(self, adapter: Snapshot) -> None:
        self._opener.adapter = adapter

    def continues(self, other: Chain) -> None:
        """The session goes on from where that of ``other`` is."""
        self.is_new, self.records_past, self.adapter = True, other.records_past, other.adapter

    # ------------------------------------------------------------ one call

    async def step(self, call: Call) -> torch.Tensor:
        """Outputs of the last positions of the call, [batch, num_wanted, hidden_size].

        Raises:
            RequestRejected: the input is wrong.
            NoRoute, PeerBusy: no server has the blocks, or room for them, for ``wait_timeout_s``; PeerBusy also at once
                if none can ever have so much room.
            RecoveryFailed: servers failed, and the time to replace them is over.
        """
        async with self.busy:
            if self._swarm.closed:
                raise closed_error()
            self._refused = None
            self.progress_s = now_s()
            self._failover.begin_call()
            try:
                await self._run(call)
            except BaseException:
                if self._refused is not None and self._refused == call.first_number:
                    self.hops[0].unpost()  # the servers are as they were before
                else:
                    await asyncio.shield(self.forget())
                raise
            finally:
                if self._probing is not None:
                    self._probing.cancel()
                if call.steps:
                    self.number = call.steps[-1].number
            self.past.extend(call.taken)
        self._copies.arrange()
        return call.output()

    async def close(self) -> None:
        """Lets the servers go once no call is under way."""
        async with self.busy:
            self._asked_s = None
            await self.forget()

    async def forget(self) -> None:
        """Lets the servers go; the next call starts with others."""
        hops, self.hops = self.hops, []
        self._refused = None
        self.past.clear()
        await close([*hops, *self._copies.forget()])

    def got_on(self) -> None:
        """There has been progress."""
        self.progress_s, self._refused = now_s(), None

    def opening(
        self, batch_size: int, num_tokens: int, sent_number: int = 0, changed_number: int = 0, *, ages: bool = True
    ) -> Opening:
        """What to ask servers for, if there are ``num_tokens`` positions per row already.

        ``ages``: the hops are as old as the session, so younger ones cannot preempt them.
        """
        if self._asked_s is None:
            self._asked_s = now_s()
        most = sys.maxsize if self._max_positions is None else self._max_positions
        reserve = min(max(self._reserve_tokens, num_tokens), most)
        # A session whose length nobody has said should not be preempted at once.
        spare = 0 if num_tokens <= self._reserve_tokens else min(max(_SPARE_TOKENS, num_tokens // 4), most - reserve)
        asked_s = self._asked_s if ages else None
        return Opening(batch_size, reserve, sent_number, changed_number, self.records_past, spare, asked_s)

    async def _run(self, call: Call) -> None:
        if self.hops:
            await self._copies.switch_ready()
        while True:
            try:
                if self.hops:
                    self.cut(call)
                    self.post(call.steps)
                else:
                    await self._failover.open(call)
                self.progress_s = now_s()
                while not call.complete:
                    try:
                        self._handle(await self._next_event(call), call)
                    except HopsFailed as failure:
                        await self._failover.recover(call, failure.errors)
                return
            except StartOver:
                call.forget_outputs()
                self.number = call.steps[-1].number
                await self.forget()

    def cut(self, call: Call) -> None:
        """Into steps that no hop finds too long."""
        batch_size, num_tokens, _ = call.inputs.hidden.shape
        call.steps = split(
            call.inputs,
            start=call.start,
            number=self.number + 1,
            size=chunk_size(num_tokens, batch_size, [hop.max_step_tokens for hop in self.hops]),
            codec=self.codec,
            changes=call.changes,
            num_wanted=call.num_wanted,
            every_block=bool(call.watched),
        )

    def post(self, steps: list[OutgoingStep]) -> None:
        """To the first hop."""
        for step in steps:
            self.hops[0].post(step.message, step.parts)

    @property
    def codec(self) -> pb.Codec:
        """Of hidden states."""
        return CODECS[self._swarm.config.compression]

    # ------------------------------------------------------------ what hops say

    async def _next_event(self, call: Call) -> HopEvent:
        """Asks all hops whether they are there when nothing comes for a while."""
        while True:
            try:
                event = await asyncio.wait_for(self._inbox.get(), self._swarm.config.timeouts.probe_after_s)
                if not isinstance(event, Trouble):
                    self.progress_s = now_s()
                return event
            except TimeoutError:
                if self._probing is None or self._probing.done():
                    self._probing = asyncio.ensure_future(self._probe(call, list(self.hops)))

    async def _probe(self, call: Call, hops: list[HopSession]) -> None:
        """Trouble for hops that do not answer, or that have what they need and do not get on."""
        asked_s = now_s()
        asking = (hop.progress(timeout_s=self._swarm.config.timeouts.probe_s) for hop in hops)
        results = await asyncio.gather(*asking, return_exceptions=True)
        timeout_s = self._swarm.config.step_timeout_s
        expected = call.steps[-1].number
        for hop, result in zip(hops, results, strict=True):
            if isinstance(result, SwarmError):
                self._inbox.put_nowait(Trouble(hop.number, None, result))
            if not isinstance(result, pb.SessionProgress):
                continue
            if result.number != hop.seen_number:
                hop.seen_number = result.number
                self.progress_s = max(self.progress_s, asked_s)
            if result.number < expected and now_s() - self.progress_s > timeout_s:
                server = hop.hop.server
                reason = f"server {server.short_id} did not finish a step within {timeout_s:g} s"
                error = PeerUnavailable(reason, server.peer_id, hop.span)
                self._inbox.put_nowait(Trouble(hop.number, None, error))
                return
            expected = result.number

    def _handle(self, event: HopEvent, call: Call) -> None:
        """Raises HopsFailed if some hop must be replaced, or what the user must know."""
        index = next((i for i, hop in enumerate(self.hops) if hop.number == event.hop), None)
        if index is None:
            self._copies.handle(event)
        elif isinstance(event, Trouble):
            self._handle_trouble(event, index, call)
        elif isinstance(event, BlockAnswer):
            self._take_block_output(event, self.hops[index], call)
        elif isinstance(event, Answer) and event.relay:
            if index + 1 < len(self.hops) and event.route == self.hops[index].route:
                self._relay(event, self.hops[index], self.hops[index + 1], call)
        elif isinstance(event, Answer) and index == len(self.hops) - 1:
            step = call.step(event.step)
            if step is not None and step.number not in call.outputs:
                call.outputs[step.number] = self._decoded(event, step, call)
                for hop in self.hops:
                    if hop.refused == step.number:
                        hop.refused = None
                self._failover.answered()

    def _handle_trouble(self, event: Trouble, index: int, call: Call) -> None:
        hop, error = self.hops[index], event.error
        if event.step is None or event.step < FIRST_STEP:
            if isinstance(error, AccessDenied):
                raise error
            raise HopsFailed({hop: error})
        if event.step <= call.answered:
            return
        if index == 0 and not call.outputs:
            self._refused = event.step
        if isinstance(error, PeerBusy):
            raise HopsFailed({hop: error})
        if index == 0:
            raise error
        if hop.refused is not None and event.step > hop.refused:
            return  # in the wake of the one that is refused already
        hop.refused = event.step
        # The input came from the server before: that one is not right, or else this one.
        call.num_refusals += 1
        if call.num_refusals > _MAX_REFUSALS:
            raise error
        before = self.hops[index - 1]
        server = before.hop.server
        reason = f"server {server.short_id} sent on what is wrong: {error}"
        errors: dict[HopSession, SwarmError] = {before: BadReply(reason, server.peer_id, before.span)}
        if call.num_refusals > 1:
            errors[hop] = PeerError(str(error), hop.hop.server.peer_id, hop.span)
        raise HopsFailed(errors)

    def _relay(self, answer: Answer, sender: HopSession, to: HopSession, call: Call) -> None:
        step = to.replayed.get(answer.step) or call.step(answer.step)
        if step is None:
            return
        ours, theirs = step.message.hidden, answer.hidden
        if theirs is None or (theirs.header.dtype, theirs.header.shape) != (ours.dtype, ours.shape):
            server = sender.hop.server
            error = BadReply(f"server {server.short_id} answered another shape", server.peer_id, sender.span)
            raise HopsFailed({sender: error})
        onward = step.with_hidden(theirs)
        to.post(onward.message, onward.parts)

    def _take_block_output(self, answer: BlockAnswer, hop: HopSession, call: Call) -> None:
        step = call.step(answer.step)
        if step is None or answer.block not in call.watched:
            return
        server = hop.hop.server
        try:
            if answer.block not in hop.span:
                raise BadReply(f"server {server.short_id} answered for block {answer.block}")
            like = call.inputs.hidden
            shape = like.shape[0], step.end - step.start, like.shape[2]
            call.block_outputs[answer.block, step.number] = answer.hidden.decode(shape, like.dtype)
        except BadReply as error:
            raise HopsFailed({hop: BadReply(str(error), server.peer_id, hop.span)}) from None

    def _decoded(self, answer: Answer, step: OutgoingStep, call: Call) -> torch.Tensor | None:
        if not step.message.outputs_wanted:
            return None
        like, hop = call.inputs.hidden, self.hops[-1]
        try:
            if answer.hidden is None:
                raise BadReply(f"server {hop.hop.server.short_id} answered nothing")
            return answer.hidden.decode((like.shape[0], step.message.outputs_wanted, like.shape[2]), like.dtype)
        except BadReply as error:
            raise HopsFailed({hop: BadReply(str(error), hop.hop.server.peer_id, hop.span)}) from None
