"""All sessions of one server, by the keys under which peers find them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from math import isfinite
from typing import TypeVar

from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected, SessionLost
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.adapters.store import AdapterStore
from swarm_server.engine.engine import Engine
from swarm_server.engine.scheduler import Scheduler
from swarm_server.kv.kv_cache import CacheBudget, NoRoom
from swarm_server.net.push import ChannelPool
from swarm_server.net.validation import RequestValidator
from swarm_server.sessions.admission import Admission, Holder, choose_victims
from swarm_server.sessions.sessions import HostedSession, Reply
from swarm_server.training.training_memory import TrainingMemory

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
_END_TIMEOUT_S = 5.0  # for sessions that are asked to end
_MAX_WAIT_S = 24 * 3600.0  # for room
T = TypeVar("T")


@dataclass
class SessionManager:
    """What all sessions of one server share."""

    engine: Engine
    scheduler: Scheduler
    budget: CacheBudget
    validator: RequestValidator
    channels: ChannelPool
    max_sessions: int
    training: TrainingMemory
    adapters: AdapterStore = field(default_factory=AdapterStore)

    def __post_init__(self) -> None:
        self.placing = asyncio.Lock()
        self.admission = Admission(self.budget, self.max_sessions)
        self._numbers = count()  # of sessions, as they were let in
        self._uses: dict[bytes, ExitStack] = {}  # of adapters, by session
        self._sessions: dict[bytes, HostedSession] = {}
        self._closed = asyncio.Event()  # some session, since somebody looked
        self.leaving = False
        self.ended = asyncio.Event()

    async def open(self, request: pb.Open, client: str, reply: Reply) -> HostedSession:
        """A session, which must be closed. Waits for room as long as the request says.

        Raises:
            PeerMoved, RequestRejected: see ``RequestValidator``; PeerMoved also if the server is about to leave.
            PeerBusy: there is no room.
            CacheMiss: it needs an adapter that is not here.
        """
        self.require_staying()
        blocks = self.validator.blocks(request.contract)
        batch_size = self.validator.batch_size(request.batch_size)
        self.validator.length(request.reserve_tokens)
        require_key(request.session_key, "the session key")
        keeps_outputs = request.HasField("next")
        layout = self.engine.layout_of(blocks, keeps_outputs)
        wanted_tokens = self.validator.at_most(request.reserve_tokens + request.spare_tokens)
        born_s = asyncio.get_running_loop().time() - _seconds(request.age_s)
        with ExitStack() as uses:
            adapter = uses.enter_context(self.adapters.using(request.adapter)) if request.HasField("adapter") else None
            self._require_new(request.session_key)
            lease = await self.admission.lease(
                client,
                batch_size * layout.size_bytes(request.reserve_tokens),
                batch_size * layout.size_bytes(wanted_tokens),
                born_s,
                min(_MAX_WAIT_S, _seconds(request.wait_s)),
                require=self.require_staying,
            )
            try:
                self._require_new(request.session_key)
                session = self.engine.open(
                    blocks,
                    batch_size,
                    lease,
                    reserved=request.reserve_tokens,
                    keeps_outputs=keeps_outputs,
                    records_past=request.records_past,
                    adapter=adapter,
                )
                hosted = HostedSession(self, request, session, reply, (born_s, next(self._numbers)))
            except BaseException:
                lease.close()
                self.admission.left()
                raise
            self._sessions[request.session_key] = hosted
            self._uses[request.session_key] = uses.pop_all()
        return hosted

    async def with_room(self, hosted: HostedSession, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work`` returns, which is tried again when it finds no room and younger sessions can be preempted.

        Raises:
            NoRoom: this session itself is preempted; its client may ask for room again.
        """
        try:
            return await work()
        except NoRoom as error:
            shortage = error
        with self.admission.growing():
            while True:
                await self._give_way(hosted, shortage)
                try:
                    return await work()
                except NoRoom as error:
                    shortage = error

    async def _give_way(self, hosted: HostedSession, shortage: NoRoom) -> None:
        """Ends the youngest sessions so that this one can grow. Raises the shortage if that would not do."""
        if hosted.gives_way or hosted.closed:
            raise shortage
        if not any(other.gives_way for other in self._sessions.values()):
            others = {Holder(other.seniority, other.session.lease.charged): other for other in self._sessions.values()}
            victims = choose_victims(shortage.missing_bytes, list(others), hosted.seniority)
            if not victims:
                raise shortage
            for victim in victims:
                others[victim].give_way()
        await self.admission.until_something_changes()

    def _require_new(self, session_key: bytes) -> None:
        if session_key in self._sessions:
            raise RequestRejected("a session with this key is open already")

    def require_staying(self) -> None:
        """Raises PeerMoved if the server is about to leave."""
        if self.leaving:
            raise PeerMoved("the server is leaving the swarm")

    def find(self, session_key: bytes) -> HostedSession:
        """Raises SessionLost if there is none."""
        try:
            return self._sessions[session_key]
        except KeyError:
            raise SessionLost("this server does not know the session") from None

    async def forget(self, hosted: HostedSession) -> None:
        del self._sessions[hosted.key]
        uses = self._uses.pop(hosted.key)
        self._closed.set()
        try:
            await self.scheduler.call(lambda: self.engine.close(hosted.session))
        except PeerBusy:  # the server ends
            hosted.session.lease.close()
        finally:
            uses.close()
            self.admission.left()

    async def leave(self, timeout_s: float) -> None:
        """Takes no new sessions and asks those there are to move; returns when all have, or after ``timeout_s``."""
        self.leaving = True
        await asyncio.gather(*(hosted.ask_to_move() for hosted in self._sessions.values()))
        await self._wait_until_empty(timeout_s)

    async def close(self) -> None:
        """Ends all sessions; their clients must find others."""
        self.leaving = True
        self.ended.set()
        await self._wait_until_empty(_END_TIMEOUT_S)
        self.adapters.close()
        self.training.close()

    async def _wait_until_empty(self, timeout_s: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while self._sessions and (left_s := deadline - clock()) > 0:
            self._closed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), left_s)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)


def require_key(key: bytes, what: str) -> None:
    """Raises RequestRejected if a key of the client's choice is too short to be a secret, or too long to be kept."""
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise RequestRejected(f"{what} has {len(key)} bytes: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")


def _seconds(value: float) -> float:
    """What a client says, if it can be."""
    return max(0.0, value) if isfinite(value) else 0.0
