"""All sessions of one server, under two keys: one for the client, and one for the peer that pushes steps."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack
from itertools import count
from math import isfinite

from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected, SessionLost
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import FIRST_STEP
from swarm_server.admission.admission import Admission
from swarm_server.admission.births import Births
from swarm_server.admission.preemption import Claim, Preemption
from swarm_server.net.validation import require_key, require_user
from swarm_server.sessions.services import SpanServices
from swarm_server.sessions.sessions import HostedSession, Reply

_END_TIMEOUT_S = 5.0  # for sessions that are asked to end
_YOUNGER_S = 1e9  # how much younger than others a background session counts
_MAX_WAIT_S = 24 * 3600.0  # the longest time that a request may wait for room


class SessionManager:
    """The sessions of one hosted span.

    Attributes:
        ended: the event that is set when all sessions must end.
    """

    def __init__(self, services: SpanServices, max_sessions: int) -> None:
        self.services = services
        self.admission = Admission(services.budget, max_sessions)
        self.ended = asyncio.Event()
        self._preemption = Preemption(self.admission)
        self._births = Births()
        self._numbers = count()  # numbers sessions in the order of their admission
        self._uses: dict[bytes, ExitStack] = {}  # by session key: the use of an adapter, if the session has one
        self._sessions: dict[bytes, HostedSession] = {}
        self._pushed: dict[bytes, HostedSession] = {}  # the same, by push key
        self._closed = asyncio.Event()  # set when a session has closed since the last check
        self._leaving = False

    async def open(self, request: pb.Open, client: Caller, reply: Reply) -> HostedSession:
        """Wait for room as long as the request allows, and return a new session, which ``end`` must end later.

        Raises:
            PeerMoved, RequestRejected: see ``RequestValidator``; PeerMoved also if the server is about to leave.
            PeerBusy: there is no room.
            CacheMiss: the session needs an adapter that is not loaded here.
        """
        self.require_staying()
        engine, validator, adapters = self.services.engine, self.services.validator, self.services.adapters
        blocks = validator.blocks(request.contract)
        batch_size = validator.batch_size(request.batch_size)
        validator.batch_size(batch_size + request.num_copies)
        validator.length(max(request.reserve_tokens, request.copy_tokens))
        require_key(request.session_key, "the session key")
        require_user(request.user)
        validator.codec(request.codec)
        keeps_outputs = request.HasField("next")
        if keeps_outputs:
            validator.next_hop(request.next)
        layout = engine.layout_of(blocks, keeps_outputs)
        copies_bytes = request.num_copies * layout.size_bytes(request.copy_tokens)
        wanted_tokens = validator.at_most(request.reserve_tokens + request.spare_tokens)
        arrived_s = asyncio.get_running_loop().time()
        born_s = self._births.born_s(client.peer_id, arrived_s, _seconds(request.age_s), request.asked_s)
        born_s += _YOUNGER_S * request.is_background
        with ExitStack() as uses:
            adapter = uses.enter_context(adapters.using(request.adapter)) if request.HasField("adapter") else None
            self._require_new(request.session_key)
            lease = await self.admission.lease(
                client,
                batch_size * layout.size_bytes(request.reserve_tokens) + copies_bytes,
                batch_size * layout.size_bytes(wanted_tokens) + copies_bytes,
                born_s,
                min(_MAX_WAIT_S, _seconds(request.wait_s)),
                require=self.require_staying,
            )
            with ExitStack() as undo:
                undo.callback(self.admission.left, client)
                undo.callback(lease.close)
                self._require_new(request.session_key)
                session = engine.open(
                    blocks,
                    batch_size,
                    lease,
                    reserved=request.reserve_tokens,
                    keeps_outputs=keeps_outputs,
                    records_past=request.records_past,
                    owner=client.peer_id,
                    adapter=adapter,
                )
                claim = Claim(lease, (born_s, next(self._numbers)), client, session.forget_promise)
                hosted = HostedSession(self.services, self._preemption, claim, client, request, session, reply)
                undo.pop_all()
            self._sessions[hosted.key] = self._pushed[hosted.push_key] = hosted
            self._preemption.add(claim)
            self._uses[hosted.key] = uses.pop_all()
        self.services.counters.sessions["replacement" if request.last_number >= FIRST_STEP else "new"] += 1
        return hosted

    def _require_new(self, session_key: bytes) -> None:
        if session_key in self._sessions:
            raise RequestRejected("a session with this key is open already")

    def require_staying(self) -> None:
        """Raise PeerMoved if the server is about to leave."""
        if self._leaving:
            raise PeerMoved("the server is leaving the swarm")

    def find(self, session_key: bytes, client: Caller) -> HostedSession:
        """Return the client's session. Raise SessionLost if there is none, or if it is another client's."""
        hosted = self._sessions.get(session_key)
        if hosted is None or hosted.client.peer_id != client.peer_id:
            raise SessionLost("this server does not know the session")
        return hosted

    def find_pushed(self, push_key: bytes) -> HostedSession:
        """Return the session with this push key, for any peer that has the key. Raise SessionLost if there is none."""
        hosted = self._pushed.get(push_key)
        if hosted is None:
            raise SessionLost("this server does not know the session")
        return hosted

    async def end(self, hosted: HostedSession) -> None:
        """Close the session and release its adapters, its lease and its place."""
        try:
            await hosted.close()
        finally:
            del self._sessions[hosted.key], self._pushed[hosted.push_key]
            self._preemption.remove(hosted.claim)
            uses = self._uses.pop(hosted.key)
            self._closed.set()
        try:
            await self.services.scheduler.call(lambda: self.services.engine.close(hosted.session))
        except PeerBusy:  # the server ends, and its compute thread takes no more calls
            hosted.session.lease.close()
        finally:
            uses.close()
            self.admission.left(hosted.client)

    async def leave(self, timeout_s: float) -> None:
        """Take no new sessions, ask the open ones to move, and return when all have moved or after ``timeout_s``."""
        self._leaving = True
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + timeout_s
        if asking := [asyncio.ensure_future(hosted.ask_to_move()) for hosted in self._sessions.values()]:
            _, deaf = await asyncio.wait(asking, timeout=timeout_s)
            for task in deaf:  # its client does not read what it is sent
                task.cancel()
        await self._wait_until_empty(deadline_s - clock())

    async def close(self) -> None:
        """End all sessions; their clients must find other servers."""
        self._leaving = True
        self.ended.set()
        await self._wait_until_empty(_END_TIMEOUT_S)
        self.services.adapters.close()
        self.services.training.close()
        await asyncio.to_thread(self.services.offload.close)

    async def _wait_until_empty(self, timeout_s: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self._sessions and (left_s := deadline - clock()) > 0:
            self._closed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._closed.wait()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)


def _seconds(value: float) -> float:
    """Return a duration that a client reports, or 0 if it is negative or not finite."""
    return max(0.0, value) if isfinite(value) else 0.0
