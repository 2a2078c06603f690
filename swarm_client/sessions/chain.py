"""A session's chain of servers: sends steps, collects outputs, and replaces hops that fail or leave."""

from __future__ import annotations

import asyncio
from collections import deque

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.core.background import now_s
from swarm_client.core.events import Move, Reporter
from swarm_client.failover.failover import decide
from swarm_client.failover.messages import Event, Resume, Splice, StartOver
from swarm_client.failover.replay import Taken
from swarm_client.routing.own_load import SessionLoad
from swarm_client.routing.routing import Route
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.listener import ChainListener, Failures
from swarm_client.sessions.opening import LaneSettings, Opener, Terms, close
from swarm_client.sessions.replacement import HopReplacer
from swarm_client.sessions.standby import StandbyReplicas
from swarm_client.swarm.swarm import closed_error
from swarm_client.transport.hops import HopSession, Inbox
from swarm_client.transport.steps import OutgoingStep, chunk_size
from swarm_protocol.errors import PeerBusy, SessionLost, SwarmError
from swarm_protocol.failures import awaited_on_error
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import FIRST_STEP

_PAST_STEPS = 256  # the most steps that a replica may lag behind


class Chain:
    """The chain of hops of one session. All methods run on the background loop, one call at a time.

    Attributes:
        hops: the hops, first blocks first. Only the chain changes this list; other objects read it.
        number: the number of the last step that was sent.
        opener: the opener of the hops; ``terms``: the terms that the hops are opened with.
        is_new: whether the session has earlier positions that have not been sent to any server yet.
        busy: held during a call, and while hops are moved or released.
    """

    def __init__(self, setting: LaneSettings, reporter: Reporter) -> None:
        self.hops: list[HopSession] = []
        self.number = FIRST_STEP - 1
        self.is_new = False
        self._swarm, self._blocks, options = setting.swarm, setting.blocks, setting.options
        swarm = self._swarm
        self._reporter = reporter
        inbox = Inbox(self._hop_leaves)
        self.opener = opener = Opener(swarm, inbox, options.is_bundled, options.purpose)
        self.terms = terms = Terms(setting.max_positions, options.reserve_tokens)
        standby = swarm.config.standby if options.standby is None else options.standby
        self._standby = StandbyReplicas(self.hops, swarm, opener, terms, standby, self._move_between_calls)
        self._replacer = HopReplacer(self.hops, swarm, opener, terms, self._standby, reporter)
        self._listener = ChainListener(self.hops, swarm, inbox, self._replacer.answered, self._standby.handle)
        self._call: SessionCall | None = None  # the call under way
        self._past: deque[Taken] = deque(maxlen=_PAST_STEPS)  # the steps before the call under way
        self._moving: asyncio.Task[None] | None = None
        # Settled: all steps sent to the first hop are computed. After a splice, outputs may arrive earlier than that.
        self._is_settled = self._was_spliced = False
        self.busy = asyncio.Lock()
        swarm.sessions.add(self)

    @property
    def route(self) -> Route:
        """Return the servers that hold the KV cache now, first blocks first; empty before the first step."""
        return tuple(session.hop for session in self.hops)

    @property
    def load(self) -> SessionLoad:
        """Return the load that the session puts on servers; it is empty while the session still chooses a chain."""
        if self.opener.is_choosing:
            return SessionLoad((), 0)
        call, opening = self._call, self.opener.opening
        if call is None:
            num_waiting = 0
        elif opening and not self.hops:
            num_waiting = call.after.length * call.inputs.hidden.shape[0]
        else:
            num_waiting = sum(step.num_positions for step in call.steps if step.number not in call.outputs)
        return SessionLoad(self.route + opening, num_waiting)

    @property
    def codecs(self) -> tuple[pb.Codec, ...]:
        """Return the codecs from the client to the first hop of ``route``, between hops, and back to the client."""
        return (*map(self.opener.codec_to, self.hops[:1]), *(session.codec for session in self.hops))

    def reset(self) -> None:
        """Begin a session without positions. The caller must have released the servers."""
        self.is_new = False

    def begin_with(self, adapter: AdapterSnapshot) -> None:
        """Begin a session with positions that no server has; they were computed with this adapter."""
        self.is_new = True
        self.opener.use_adapter(adapter)

    def continues(self, other: Chain) -> None:
        """Continue the session of ``other`` from its present position, with its adapter."""
        self.begin_with(other.opener.adapter)
        if other.terms.records_past:
            self.terms.record_past()

    # ------------------------------------------------------------ one call

    async def step(self, call: SessionCall, may_wait: bool = True) -> None:
        """Run the call on the servers, so that it is complete.

        ``may_wait``: wait for KV room; if it is False, the step fails at once where there is no room.

        Raises:
            RequestRejected: the input is wrong.
            NoRoute, PeerBusy: no server has held the blocks, or had room for them, for ``wait_timeout_s``. PeerBusy
                also comes at once if no server can ever have that much room.
            RecoveryFailed: servers failed, and the time to replace them is over.
            SwarmError: the reason why an optional call was given up. If the first server had no room, all servers are
                as they were before the call.
        """
        async with self.busy:
            if self._swarm.closed:
                raise closed_error()
            self._listener.made_progress()
            self._replacer.begin_call(may_wait and not call.is_optional)
            self._was_spliced = False
            self._call = call
            try:
                async with awaited_on_error(lambda: self._take_back(call)):
                    await self._run(call)
                    self._is_settled = not self._was_spliced
            finally:
                self._call = None
                self._listener.end_call()
                if call.steps:
                    self.number = call.steps[-1].number
            self._past.extend(call.taken)
            self._swarm.worked(hop.hop.server.peer_id for hop in self.hops)
        self._standby.arrange()

    async def _take_back(self, call: SessionCall) -> None:
        """Let the servers hold what they held before a call that has failed, or release them."""
        self._is_settled = False
        if self._listener.refused is not None and self._listener.refused == call.first_number:
            self.hops[0].unpost()  # the first server has computed nothing, so the others have not either
        else:
            await asyncio.shield(self._forget())

    async def close(self) -> None:
        """Release the servers once no call is under way."""
        async with self.busy:
            self.terms.forget_age()
            await self._forget()

    async def let_go(self) -> None:
        """Release the servers; the next call opens new hops and replays the whole session to them."""
        async with self.busy:
            await self._forget()

    async def _forget(self) -> None:
        """Release the servers without taking the lock; the next call opens new hops."""
        hops = list(self.hops)
        self.hops.clear()
        self.opener.plan(())
        self._listener.forget_refusal()
        self._past.clear()
        await close([*hops, *self._standby.forget()])

    async def _run(self, call: SessionCall) -> None:
        if self.hops:
            await self._move()
        while True:
            if self.hops:
                self._cut(call)
                self._post(call.steps, is_alone=self._is_settled and len(call.steps) == 1)
            elif call.is_optional:
                raise SessionLost("the session's servers were let go")
            else:
                await self._open(call)
            self._listener.made_progress()
            if await self._complete(call):
                return
            call.forget_outputs()
            self.number = call.steps[-1].number
            await self._forget()

    async def _open(self, call: SessionCall) -> None:
        """Open hops for all blocks, and replay all positions from before the call."""
        if call.before.length and not self.is_new:  # the session has lost its servers
            self._replacer.begin_recovery(self._listener.progress_s)
        call.apply_changes()
        # In place: the standby replicas, the replacer and the listener share the list.
        self.hops[:] = await self._replacer.open_all(self._blocks, call, self.number)
        self.is_new = False
        self._cut(call)
        self._post(self._replacer.replay_all(call, self.hops))

    async def _complete(self, call: SessionCall) -> bool:
        """Wait for all outputs. Return False if the call must begin again with other hops."""
        while not call.complete:
            errors = self._listener.handle(await self._listener.next_event(call), call)
            if errors and not await self._recover(call, errors):
                return False
        return True

    async def _recover(self, call: SessionCall, errors: Failures) -> bool:
        """Replace failed hops, and hops that fail during the replacement. Return False if the call must begin again."""
        first_error = next(iter(errors.values()))
        if call.is_optional and isinstance(first_error, PeerBusy):
            raise first_error
        self._replacer.begin_recovery(self._listener.progress_s)
        state = self._replacer.begin_failover(call, self._past)
        event: Event = self._replacer.failure(errors)
        try:
            while True:
                state, instructions = decide(state, event)
                for instruction in instructions:
                    match instruction:
                        case Splice(gap):
                            self._was_spliced = True
                            self.hops[gap.start : gap.stop] = self._replacer.splice(instruction)
                        case Resume():
                            self._listener.made_progress()
                            return True
                        case StartOver():
                            return False
                        case _:
                            event = await self._replacer.carry_out(instruction, call) or event
        finally:  # after an error or an interruption there may be new hops
            self._replacer.abandon_new()

    def _cut(self, call: SessionCall) -> None:
        """Cut the call's inputs into steps that are short enough for every hop."""
        batch_size, num_tokens, _ = call.inputs.hidden.shape
        num_slow = self._swarm.links.num_slow([hop.hop for hop in self.hops], num_tokens * batch_size)
        size = chunk_size(num_tokens, batch_size, [hop.max_step_tokens for hop in self.hops], num_slow)
        call.cut(self.number + 1, size, self.opener.codec_to(self.hops[0]))
        self.terms.reach(call.steps[-1].number)

    def _post(self, steps: list[OutgoingStep], is_alone: bool = False) -> None:
        """Send the steps to the first hop."""
        for step in steps:
            self.hops[0].post(step.message, step.parts, is_alone)

    # ------------------------------------------------------------ servers that leave

    def _hop_leaves(self) -> None:
        """Start to replicate and move the hop when its server has announced that it wants to leave."""
        self._standby.arrange()
        self._moving = asyncio.ensure_future(self._move_between_calls())

    async def _move_between_calls(self) -> None:
        async with self.busy:
            await self._move()

    async def _move(self) -> None:
        """Replace hops on leaving servers by their replicas. No call may be under way."""
        for index, hop in enumerate(list(self.hops)):
            replica = self._standby.of(hop) if hop.leaving else None
            if replica is None:
                continue
            start_s = now_s()
            num_tokens = await self._standby.catch_up(hop)
            if num_tokens is None:
                continue
            try:
                if index:
                    before = self.hops[index - 1]  # perhaps a replica itself, since the last round of this loop
                    codec = self._swarm.links.codec(before.hop.server, replica.hop.server)
                    await before.reroute(replica, [], codec)
            except SwarmError:  # the hop before may now send its outputs to either hop
                await self._forget()
                return
            self._standby.take(hop)
            self.hops[index] = replica
            await hop.close()
            servers = hop.hop.server.peer_id, replica.hop.server.peer_id
            self._reporter.report(Move(hop.span, *servers, num_tokens, now_s() - start_s))
