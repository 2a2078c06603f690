"""Opens a session's hops: finds servers, asks them for KV room, and links each hop to the next one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from itertools import count

import torch

from swarm_client.adapters.snapshots import NOTHING, AdapterSnapshot
from swarm_client.core.background import now_s
from swarm_client.core.events import OnEvent, Reporter
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.hops import HopOutput, HopSession, Inbox, Trouble, next_hop
from swarm_client.transport.steps import split
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import BadReply, PeerBusy, PeerError, PeerUnavailable
from swarm_protocol.failures import undone_on_error
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import FIRST_STEP
from swarm_protocol.wire.session_keys import new_session_key

_TRIAL_GRACE_S = 0.5  # the extra wait for other servers, once enough tried servers have answered
_SPARE_TOKENS = 64  # the fewest positions per row that are leased in addition

_Trials = Mapping[asyncio.Task[None], ServerRecord]  # each task ends once its server has computed a step


@dataclass(frozen=True)
class Opening:
    """A request for KV room that is sent to the servers of new hops.

    Attributes:
        reserve_tokens: the positions per row to lease at once; ``spare_tokens`` are leased in addition.
        asked_s: the time at which the session first asked for room; None stands for now.
        num_copies: how many rows will later be copies of the batch's rows; ``copy_tokens``: the positions to lease for
            each copy.
        prompt_pages: the pages of the positions that the hops are about to get, see ``Swarm.chain``.
        sent_number, changed_number, records_past, last_number: see ``Open`` in protos/swarm.proto.
    """

    batch_size: int
    reserve_tokens: int
    sent_number: int = 0
    changed_number: int = 0
    records_past: bool = False
    spare_tokens: int = 0
    asked_s: float | None = None
    last_number: int = 0
    num_copies: int = 0
    copy_tokens: int = 0
    prompt_pages: tuple[bytes, ...] = ()

    @property
    def need_tokens(self) -> int:
        """Return the number of positions, in all rows, that a server should have room for."""
        return self.batch_size * (self.reserve_tokens + self.spare_tokens) + self.num_copies * self.copy_tokens


class Terms:
    """The terms that all hops of one session are opened with.

    Attributes:
        records_past: whether sliding windows keep what later crops need.
        asked_s: the time at which the session first asked servers for room; None if it has not asked yet.
        last_number: the number of the session's last step.
    """

    def __init__(self, max_positions: int | None, reserve_tokens: int) -> None:
        """Take the model's ``max_positions``, and the positions per row that the session is known to need."""
        self._max_positions = max_positions
        self._reserve_tokens = reserve_tokens
        self.records_past = False
        self.asked_s: float | None = None
        self.last_number = FIRST_STEP - 1

    def record_past(self) -> None:
        """Let sliding windows keep what later crops need."""
        self.records_past = True

    def ages_with(self, other: Terms) -> None:
        """Reuse the time at which the session with these other terms first asked for room."""
        self.asked_s = other.asked_s

    def forget_age(self) -> None:
        """Let the session ask for room as a new one."""
        self.asked_s = None

    def reach(self, number: int) -> None:
        """Record the number of the session's last step."""
        self.last_number = number

    def opening(
        self,
        batch_size: int,
        num_tokens: int,
        sent_number: int = 0,
        changed_number: int = 0,
        *,
        ages: bool = True,
        num_copies: int = 0,
    ) -> Opening:
        """Return the request for hops that must hold ``num_tokens`` positions per row already.

        Args:
            ages: whether the hops have the age of the session, so that younger sessions cannot preempt them.
            num_copies: how many rows will be copies of the batch's rows after these positions.
        """
        if self.asked_s is None:
            self.asked_s = now_s()
        most = sys.maxsize if self._max_positions is None else self._max_positions
        reserve = min(max(self._reserve_tokens, num_tokens), most)
        # The length of this session is unknown; spare room keeps it from being preempted at once.
        spare = 0 if num_tokens <= self._reserve_tokens else min(max(_SPARE_TOKENS, num_tokens // 4), most - reserve)
        asked_s = self.asked_s if ages else None
        return Opening(
            batch_size,
            reserve,
            sent_number,
            changed_number,
            self.records_past,
            spare,
            asked_s,
            self.last_number,
            num_copies,
            max(0, reserve - num_tokens) if num_copies else 0,
        )


@dataclass(frozen=True)
class SessionPurpose:
    """The purpose of a session.

    Attributes:
        user: the name of the user, see ``swarm_client.batching.request.Request``.
        is_background: whether nobody waits for the answers, so that servers compute other work first.
    """

    user: str = ""
    is_background: bool = False


INTERACTIVE = SessionPurpose()


@dataclass(frozen=True)
class SessionOptions:
    """The options of one session.

    Attributes:
        reserve_tokens: the positions per row to lease at the first step. If the session becomes longer, older sessions
            may preempt it for a while when servers are full.
        standby: see ``DistributedModel.from_pretrained``, which gives the default.
        on_event: see ``DistributedModel.from_pretrained``, which gives the default.
        is_bundled: whether steps share a message with steps of other sessions that are ready at the same time.
        row_unit: the number of rows, such as the beams of one text, that are reordered among themselves.
        purpose: the user of the session, and whether somebody waits for its answers.
    """

    reserve_tokens: int = 0
    standby: bool | None = None
    on_event: OnEvent | None = None
    is_bundled: bool = False
    row_unit: int = 1
    purpose: SessionPurpose = INTERACTIVE

    def __post_init__(self) -> None:
        if self.row_unit < 1:
            raise ValueError(
                f"row_unit is {self.row_unit}: expected 1 or more rows that are reordered among themselves"
            )


@dataclass(frozen=True)
class LaneSettings:
    """The settings that all lanes of a session share."""

    swarm: Swarm
    blocks: Span
    max_positions: int | None
    options: SessionOptions
    reporter: Reporter


class Opener:
    """A session's opener of hops. All answers go to one inbox, and ``adapter`` is added to the hops' blocks.

    Attributes:
        planned: the chain to open next instead of the fastest one, if it covers the same blocks and no server is to
            be avoided.
        opening: the chain whose servers are being asked; empty if there is none.
        is_choosing: whether a chain is being chosen.
    """

    def __init__(
        self, swarm: Swarm, inbox: Inbox, is_bundled: bool = False, purpose: SessionPurpose = INTERACTIVE
    ) -> None:
        """Take the options of all hops; ``is_bundled``: see ``ServerConnection.open``."""
        self._swarm = swarm
        self._inbox = inbox
        self._is_bundled = is_bundled
        self._purpose = purpose
        self.adapter = NOTHING
        self.planned: Route = ()
        self.opening: Route = ()
        self.is_choosing = False
        self._numbers = count()

    def use_adapter(self, adapter: AdapterSnapshot) -> None:
        """Add this adapter to the blocks of hops that are opened from now on."""
        self.adapter = adapter

    def plan(self, route: Route) -> None:
        """Set the chain to open next; an empty route stands for the fastest chain."""
        self.planned = route

    async def open_span(
        self,
        span: Span,
        opening: Opening,
        after: HopSession | None,
        *,
        avoid: Collection[str] = (),
        timeout_s: float | None = None,
        like: ServerRecord | None = None,
        on_wait: Callable[[str, float], None] | None = None,
    ) -> list[HopSession]:
        """Open and return hops over ``span``; the last one sends to ``after``, or to the client if that is None.

        Raises:
            NoRoute: see ``Swarm.chain``, which gets the other arguments.
            PeerError: the error of the first hop that could not be opened; the other hops are then closed.
        """
        planned, self.planned = self.planned, ()  # a plan is for one opening: its servers may be gone later
        self.is_choosing = True
        try:
            if planned and Span(planned[0].span.start, planned[-1].span.end) == span and not avoid:
                chain = planned
                self._ask(chain)
            else:
                chain = await self._swarm.chain(
                    span,
                    opening.need_tokens,
                    avoid=avoid,
                    timeout_s=timeout_s,
                    like=like,
                    on_wait=on_wait,
                    on_choice=self._ask,
                    prompt_pages=opening.prompt_pages,
                )
            return await self._open_all(chain, opening, after)
        finally:
            self.is_choosing, self.opening = False, ()

    def _ask(self, chain: Route) -> None:
        self.is_choosing, self.opening = False, chain

    async def _open_all(self, chain: Route, opening: Opening, after: HopSession | None) -> list[HopSession]:
        jobs = [asyncio.ensure_future(work) for work in self._opened(chain, opening, after)]
        try:
            results = await asyncio.gather(*jobs, return_exceptions=True)
        except asyncio.CancelledError:  # interrupted by the user
            results = await asyncio.gather(*jobs, return_exceptions=True)  # the cancelled jobs may still open hops
            abandon(result for result in results if isinstance(result, HopSession))
            raise
        errors = [result for result in results if isinstance(result, BaseException)]
        hops = [result for result in results if isinstance(result, HopSession)]
        if errors:
            await close(hops)
            raise errors[0]
        return _linked(hops, after)

    def codec_to(self, hop: HopSession) -> pb.Codec:
        """Return the codec in which the client sends to this hop; it never changes during the hop's life."""
        return hop.codec_from_client(lambda: self._swarm.links.codec(None, hop.hop.server))

    async def try_out(self, span: Span, avoid: Collection[str], hidden_size: int) -> bool:
        """Let unproven servers of these blocks compute one step each, all at once; return whether one has answered.

        The input is noise, in a session of its own. If any server has answered, silent servers are left out like failed
        servers. If no server has answered, the client's own network may be down, and no server is left out.
        """
        asked = self._swarm.to_try(span, avoid)
        inputs = BlockInput(torch.randn(1, 1, hidden_size), None, torch.zeros(1, 1, dtype=torch.int64))
        tasks = {asyncio.ensure_future(self._computes(server, span, inputs)): server for server in asked}
        try:
            has_passed = await self._wait_for_trials(tasks, span, avoid)
        finally:
            await end_tasks(tasks)  # this also retrieves errors that are not read below
        if has_passed:
            self._leave_out_failed(tasks)
        return has_passed

    async def _wait_for_trials(self, tasks: _Trials, span: Span, avoid: Collection[str]) -> bool:
        """Wait until enough tried servers have answered, or their time is over. Return whether any has answered."""
        waiting = set(tasks)
        deadline_s = now_s() + self._swarm.config.timeouts.trial_s
        passed: list[str] = []
        while waiting and (left_s := deadline_s - now_s()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            passed += [server.peer_id for task, server in tasks.items() if task in done and task.exception() is None]
            self._swarm.worked(passed)
            if passed and self._swarm.is_covered(span, {*avoid, *self._swarm.unproven()}):
                deadline_s = min(deadline_s, now_s() + _TRIAL_GRACE_S)
        return bool(passed)

    def _leave_out_failed(self, tasks: _Trials) -> None:
        """Leave out the tried servers that have failed, or have not answered in time."""
        for task, server in tasks.items():
            if task.cancelled():
                reason = f"server {server.short_id} computed nothing when it was tried"
                self._swarm.failed(PeerUnavailable(reason, server.peer_id))
                continue
            error = task.exception()
            if isinstance(error, PeerError) and not isinstance(error, PeerBusy):
                self._swarm.failed(error)

    async def _computes(self, server: ServerRecord, span: Span, inputs: BlockInput) -> None:
        """Wait until the server has computed a step; raise SwarmError if the server refuses."""
        part = Span(max(span.start, server.span.start), min(span.end, server.span.end))
        inbox = Inbox()
        request = pb.Open(session_key=new_session_key(), batch_size=1, reserve_tokens=1)
        hop = await (await self._swarm.server(server)).open(next(self._numbers), part, request, inbox)
        with undone_on_error(hop.abandon):  # nobody else knows the hop
            (step,) = split(inputs, start=0, number=FIRST_STEP, size=1, codec=request.codec, num_wanted=1)
            hop.post(step.message, step.parts)
            event = await inbox.get()
            while not isinstance(event, HopOutput | Trouble):
                event = await inbox.get()
            if isinstance(event, Trouble):
                raise event.error
            if event.hidden is None:
                raise BadReply(f"server {server.short_id} answered nothing", server.peer_id, part)
            event.hidden.decode(inputs.hidden.shape, inputs.hidden.dtype)
        await hop.close()

    async def open_in_turn(self, chain: Route, opening: Opening, wait_s: float, asked: list[str]) -> list[HopSession]:
        """Open and return hops for all of this chain, one after the other, each once the one before has room.

        All clients ask in the order of peer ids. A session with room on one server thus waits only for servers later in
        that order. Sessions therefore never wait for each other in a circle.

        Args:
            wait_s: the longest time that the servers may keep the requests waiting, in total.
            asked: a list that receives the peer id of each server when it is asked.

        Raises:
            PeerError: the error of the first hop that could not be opened; the other hops are then abandoned.
        """
        deadline_s = now_s() + wait_s
        work = self._opened(chain, opening, None, lambda: max(0.0, deadline_s - now_s()))
        hops: dict[int, HopSession] = {}
        try:
            with undone_on_error(lambda: abandon(hops.values())):  # nobody else knows the hops
                for index in sorted(range(len(chain)), key=lambda index: chain[index].server.peer_id):
                    asked.append(chain[index].server.peer_id)
                    hops[index] = await work[index]
        finally:
            for opened in work:
                opened.close()
        return _linked([hops[index] for index in range(len(chain))], None)

    def _opened(
        self, chain: Route, opening: Opening, after: HopSession | None, wait_s: Callable[[], float] = lambda: 0.0
    ) -> list[Coroutine[None, None, HopSession]]:
        """Return coroutines that open the chain's hops, one for each hop."""
        keys = [new_session_key() for _ in chain]
        nexts: list[pb.NextHop | None] = [
            next_hop(hop.server, key) for hop, key in zip(chain[1:], keys[1:], strict=True)
        ]
        nexts.append(None if after is None else after.as_next())
        if after is None:
            self._swarm.links.measure([chain[-1].server])
        to = [*(hop.server for hop in chain[1:]), None if after is None else after.hop.server]
        codecs = [self._swarm.links.codec(hop.server, server) for hop, server in zip(chain, to, strict=True)]
        return [
            # Only the last hop leaves out outputs that the peer after it has. The new hops before it need all of them.
            self._open(hop, key, onward, codec, opening, opening.sent_number * (hop is chain[-1]), wait_s)
            for hop, key, onward, codec in zip(chain, keys, nexts, codecs, strict=True)
        ]

    async def open_copy(
        self, of: HopSession, opening: Opening, after: HopSession | None, server: ServerRecord
    ) -> HopSession:
        """Open and return an empty session on ``server`` with the same span and terms as ``of``."""
        onward = None if after is None else after.as_next()
        if after is None:
            self._swarm.links.measure([server])
        codec = self._swarm.links.codec(server, None if after is None else after.hop.server)
        hop = await self._open(Hop(server, of.span), new_session_key(), onward, codec, opening, 0)
        hop.link_to(after)
        return hop

    async def _open(
        self,
        hop: Hop,
        key: bytes,
        onward: pb.NextHop | None,
        codec: pb.Codec,
        opening: Opening,
        sent_number: int,
        wait_s: Callable[[], float] = lambda: 0.0,
    ) -> HopSession:
        number = next(self._numbers)
        server = await self._swarm.server(hop.server)
        request = pb.Open(
            session_key=key,
            batch_size=opening.batch_size,
            reserve_tokens=opening.reserve_tokens,
            codec=codec,
            next=onward,
            sent_number=sent_number,
            changed_number=opening.changed_number,
            records_past=opening.records_past,
            spare_tokens=opening.spare_tokens,
            last_number=opening.last_number,
            user=self._purpose.user,
            is_background=self._purpose.is_background,
            num_copies=opening.num_copies,
            copy_tokens=opening.copy_tokens,
            wait_s=wait_s(),
            age_s=None if opening.asked_s is None else now_s() - opening.asked_s,
            asked_s=opening.asked_s,
        )
        adapter = self.adapter.part(hop.span)
        opened = await server.open(number, hop.span, request, self._inbox, adapter, self._is_bundled)
        self._swarm.progress.waits(hop.server.peer_id, opened.queue_s, now_s())
        return opened


def _linked(hops: list[HopSession], after: HopSession | None) -> list[HopSession]:
    """Return the same hops, after setting on each the number of the hop that receives its outputs."""
    for hop, to in zip(hops, [*hops[1:], after], strict=True):
        hop.link_to(to)
    return hops


def abandon(hops: Iterable[HopSession]) -> None:
    """End the streams to servers that are gone."""
    for hop in hops:
        hop.abandon()


async def close(hops: Iterable[HopSession]) -> None:
    """Close the hops' sessions on their servers, all at once."""
    await asyncio.gather(*(hop.close() for hop in hops), return_exceptions=True)
