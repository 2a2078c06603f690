"""One peer of a robust run, which carries out what its BTARD machine decides.

All of it runs on one event loop. The machine gets the statements of a phase when the phase is over. The statements
that count are then the same for all honest peers, see ``swarm_training.broadcast.agreement``.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from swarm_protocol.errors import AccessDenied, PeerUnavailable
from swarm_protocol.net.identity import Identity
from swarm_training.broadcast import wire
from swarm_training.broadcast.agreement import Agreement
from swarm_training.broadcast.broadcasts import Broadcasts
from swarm_training.broadcast.signed import SignedStatement
from swarm_training.broadcast.wire import StatementSlot
from swarm_training.core.robust_config import Deadlines, RobustConfig
from swarm_training.core.robust_network import RobustNetwork
from swarm_training.pb import training_robust_pb2 as pb
from swarm_training.robust import instructions as todo
from swarm_training.robust import messages as msg
from swarm_training.robust.btard import Btard, BtardSnapshot
from swarm_training.robust.workbench import Delivery
from swarm_training.robust_run.data import Found, StepData, to_bytes
from swarm_training.robust_run.equivocations import attached, proven
from swarm_training.robust_run.standings import Standings
from swarm_training.robust_run.welcoming import Welcoming, proposal

_NEEDS_MODEL = todo.Compute | todo.CheckProjections | todo.Measure


@dataclass(frozen=True)
class StepResult:
    """A finished step. ``gradient``: [n] float32, the same bits at all peers; ``removed``: since the last step."""

    step: int
    gradient: Tensor
    workers: tuple[str, ...]
    removed: tuple[todo.Remove, ...]
    joined: tuple[str, ...]  # newcomers before the next step


@dataclass(frozen=True)
class Offered:
    """The state that newcomers are offered between two steps. ``result``: [n] float32, the last aggregate."""

    snapshot: BtardSnapshot
    result: Tensor


class RobustMember:
    def __init__(
        self,
        identity: Identity,
        session: bytes,
        machine: Btard,
        data: StepData,
        network: RobustNetwork,
        config: RobustConfig,
        candidates: Callable[[], list[str]] = list,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Create a member that has not begun. ``candidates``: returns the ids of peers that want to join."""
        self._random_bytes = random_bytes
        self.machine = machine
        self.data = data
        self.broadcasts = Broadcasts(identity, session, network, self._pump)
        self._me = identity.peer_id
        self._config = config
        self._candidates = candidates
        self._events: deque[msg.Event] = deque()
        self._is_pumping = self._is_closing = False
        self._place: StatementSlot | None = None  # of the open phase
        self._agreement: Agreement | None = None
        self._welcoming: Welcoming | None = None
        self._offered: Offered | None = None  # for newcomers
        self._standings = b""
        self._finished: asyncio.Queue[StepResult | Exception] = asyncio.Queue()
        self._removed: list[todo.Remove] = []
        self._may_compute = asyncio.Event()
        self._audit: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ life

    def load(self, snapshot: BtardSnapshot, result: Tensor) -> None:
        """Load what honest peers agree on after the last finished step, and the gradient of that step."""
        self.machine.load(snapshot)
        self.data.bench.load(result)

    def begin(self, step: int, joined: tuple[str, ...]) -> None:
        self.broadcasts.at(step, 0)
        self.data.blobs.forget(step)
        snapshot = self.machine.snapshot()
        last, target = snapshot.last, snapshot.audits.get(self._me)
        if last is not None and target is not None:
            self._audit = self._spawn(self._post_found(self.data.audited(target, last)))
        self._events.append(msg.Begin(step, self._random_bytes(32), joined))
        self._pump()
        self._open_welcome(step)

    def ready(self) -> frozenset[str]:
        """Return the founders that have found all other founders."""
        return frozenset(self.broadcasts.agreement(StatementSlot(0, 0, "ready")).statements)

    async def finished(self) -> StepResult:
        """Wait for the next finished step, and return it. This peer starts to compute gradients only during this call.

        Raises:
            AccessDenied: this peer has been banned.
            PeerUnavailable: this peer has been removed, or hears nothing of most other peers.
        """
        if self._finished.empty():
            self._may_compute.set()
        try:
            done = await self._finished.get()
        finally:
            self._may_compute.clear()
        if isinstance(done, Exception):
            self._finished.put_nowait(done)
            raise done
        return done

    def close(self) -> None:
        self.broadcasts.close()
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------ requests of other peers

    async def tell(self, peer_id: str, request: pb.TellRequest) -> None:
        if peer_id not in self.broadcasts.peers:
            raise PeerUnavailable("this peer does not know the caller, or not yet")
        for message in request.statements:
            statement = SignedStatement.from_proto(message)
            try:
                if not self.broadcasts.is_expected(statement):
                    continue
            except ValueError:
                continue
            digests = wire.digests_of(statement.said)
            if all(self.data.blobs.get(digest) is not None for digest in digests):
                self.broadcasts.take(statement, message.endorsements, peer_id)
            elif len(digests) <= 2 * len(self.broadcasts.peers):
                self._spawn(self._take_with_data(statement, message, peer_id, digests))

    async def offer(self, finished: StepResult, state: bytes) -> None:
        """Offer newcomers the parameters and optimizer state after that step, and the standings to start from."""
        if self._offered is None or self.machine.known.round.step != finished.step + 1:
            return
        step, readers = finished.step + 1, finished.joined
        digest = await self.data.blobs.put(state, step, readers)
        result = await self.data.blobs.put(to_bytes(self._offered.result), step, readers)
        session, snapshot = self.broadcasts.session, self._offered.snapshot
        self._standings = Standings(session, step, readers, snapshot, digest, len(state), result).to_bytes()

    async def standings(self, peer_id: str) -> bytes:
        """Return the standings for newcomers. Raises PeerUnavailable while there are none for the caller."""
        if not self._standings or peer_id not in self.broadcasts.peers:
            raise PeerUnavailable("this peer has not welcomed the caller, or not yet")
        return self._standings

    async def fetch(self, peer_id: str, digest: bytes) -> bytes:
        return await self.data.blobs.read(digest, peer_id)

    # ------------------------------------------------------------ the machine

    def _post(self, *events: msg.Event) -> None:
        self._events.extend(events)
        self._pump()

    def _pump(self) -> None:
        """Handle events, and carry out the machine's instructions, until no event is left."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._events:
                for instruction in self.machine.handle(self._events.popleft()):
                    self._carry_out(instruction)
                self._open_phase()
                self._look()
        finally:
            self._is_pumping = False
        self._look()

    def _carry_out(self, instruction: todo.Instruction) -> None:
        match instruction:
            case todo.Broadcast(message):
                self._say(message)
            case todo.Remove():
                self._removed.append(instruction)
                if instruction.peer == self._me:
                    self._fail(_removal(instruction))
            case todo.Finish(current):
                self._spawn(self._finish(instruction, current))
            case _:
                self._spawn(self._work(instruction))

    def _open_phase(self) -> None:
        self.broadcasts.set_peers(self.machine.roster.all)
        waiting, current = self.machine.waits_for, self.machine.known.round
        place = None if waiting is None else StatementSlot(current.step, current.attempt, wire.kind_of(waiting[0]))
        if place is None or waiting is None or place == self._place:
            return
        self.broadcasts.at(place.step, place.attempt)
        self._place, self._is_closing = place, False
        self._agreement = self._opened(place, waiting[1])
        late_s = Deadlines.of(place.kind, self._config, self.machine.num_elements).late_s
        self._later(late_s, lambda: self._become_late(place))
        if place.kind == "receipt" and self._me in current.owners:
            found = self.data.parts_for(self._me, self.machine.known)
        elif place.kind == "reveal":
            found = self.data.aggregates(self._me, self.machine.known, self.machine.roster.all)
        else:
            return
        for each in found:
            self._spawn(self._post_found(each))

    def _opened(self, place: StatementSlot, expected: frozenset[str]) -> Agreement:
        agreement = self.broadcasts.agreement(place)
        deadlines = Deadlines.of(place.kind, self._config, self.machine.num_elements)
        deadline_s = _now() + deadlines.deadline_s
        agreement.open(expected, self.machine.roster.full, deadline_s, deadlines.spread_s)
        self._later(agreement.end_s - _now() + 0.01, self._look)
        return agreement

    def _open_welcome(self, step: int) -> None:
        if self._me not in self.machine.roster.all:
            return
        self._welcoming = Welcoming(
            self._opened(StatementSlot(step, 0, "welcome"), frozenset(self.machine.roster.full))
        )
        if self._me in self.machine.roster.full:
            banned = (name for name, removed in self.machine.removed.items() if removed.is_banned)
            self.broadcasts.say(proposal(step, self._candidates, {*self.machine.roster.all, *banned}))
        self._look()

    async def _post_found(self, found: Found) -> None:
        self._post(*await found)

    def _become_late(self, place: StatementSlot) -> None:
        if place == self._place:
            self._post(msg.Late())

    def _look(self) -> None:
        """Vote on what was heard, and close the vote on newcomers and the phase if they are over."""
        if self._welcoming is not None and not self._welcoming.is_over.is_set():
            self._vote(StatementSlot(self.machine.known.round.step, 0, "welcome"), self._welcoming.agreement)
            self._welcoming.look(_now())
        if self._agreement is None or self._place is None:
            return
        self._vote(self._place, self._agreement)
        heard = self._agreement.outcome(_now())
        if heard is None or self._is_closing:
            return
        self._is_closing = True
        if not self._agreement.has_majority(heard):
            self._fail(PeerUnavailable("nothing is heard of most peers of the run: join it again"))
        else:
            self._spawn(self._close_phase(self._place, heard))

    def _vote(self, place: StatementSlot, agreement: Agreement) -> None:
        if self._me in self.machine.roster.full and (digests := agreement.vote(_now())) is not None:
            phase = pb.Said.DESCRIPTOR.fields_by_name[place.kind].number
            vote = pb.Vote(phase=phase, digests=digests)
            self.broadcasts.say(pb.Said(step=place.step, attempt=place.attempt, vote=vote))

    async def _close_phase(self, place: StatementSlot, heard: Mapping[str, SignedStatement]) -> None:
        events: list[msg.Event] = []
        for statement in heard.values():
            events += proven(statement, self.broadcasts.session)
        for sender, statement in heard.items():
            try:
                message = wire.to_message(sender, statement.said)
            except ValueError:
                continue
            events += await self.data.take_message(message)
        if place == self._place:
            self._post(*events)
        if place == self._place:  # the phase is still open: some peers have not spoken
            self._post(msg.Deadline())

    # ------------------------------------------------------------ the machine's instructions

    def _say(self, message: msg.BroadcastMessage) -> None:
        said = wire.to_said(message)
        said.equivocations.extend(attached(self.broadcasts.agreements_of(message.step, message.attempt)))
        self.broadcasts.say(said)

    async def _work(self, instruction: todo.Instruction) -> None:
        if isinstance(instruction, _NEEDS_MODEL):
            await self._may_compute.wait()
            if (instruction.round.step, instruction.round.attempt) != self._now_at:
                return
        if isinstance(instruction, todo.CheckProjections) and self._audit is not None:
            await asyncio.wait([self._audit], timeout=self._config.compute_s / 4)
        for outcome in await self.data.on_bench(lambda: self.data.bench.carry_out(instruction)):
            if isinstance(outcome, Delivery):
                await self._deliver(outcome)
            else:
                self._post(outcome)

    async def _deliver(self, delivery: Delivery) -> None:
        message = await self.data.give(delivery)
        if delivery.to in (None, self._me):
            self._post(*await self.data.take_own(delivery))
        if message is not None:
            self._say(message)

    async def _finish(self, instruction: todo.Finish, current: msg.RobustRound) -> None:
        missing = self.data.aggregates(self._me, self.machine.known, self.machine.roster.all)
        if not all(await asyncio.gather(*missing)):
            self._fail(PeerUnavailable("nobody gives this peer the aggregates of a step: join the run again"))
            return
        await self.data.on_bench(lambda: self.data.bench.carry_out(instruction))
        assert self._welcoming is not None
        await self._welcoming.is_over.wait()
        joined = self._welcoming.joining(_now())
        self._standings = b""
        self._offered = Offered(self.machine.snapshot(), self.data.bench.result) if joined else None
        removed, self._removed = tuple(self._removed), []
        gradient = self.data.bench.result
        self._finished.put_nowait(StepResult(current.step, gradient, current.workers, removed, joined))
        self._may_compute.clear()
        self.begin(current.step + 1, joined)

    async def _take_with_data(
        self, statement: SignedStatement, message: pb.Statement, teller: str, digests: tuple[bytes, ...]
    ) -> None:
        """Take a statement once its data is here. The data is fetched from ``teller``, which must have it."""
        for digest in digests:
            if self.data.blobs.get(digest) is None:
                data = await self.data.fetch_once(digest, teller)
                if data is None:
                    return
                await self.data.blobs.put(data, statement.place.step + 1)
        if self.broadcasts.is_expected(statement):
            self.broadcasts.take(statement, message.endorsements, teller)

    @property
    def _now_at(self) -> tuple[int, int]:
        return self.machine.known.round.step, self.machine.known.round.attempt

    def _fail(self, error: Exception) -> None:
        self._finished.put_nowait(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, TimeoutError):
            self._fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(max(seconds, 0.0), partial(_if_open, self, call))


def _if_open(member: RobustMember, call: Callable[[], None]) -> None:
    if member.broadcasts.peers:
        call()


def _removal(removed: todo.Remove) -> Exception:
    if removed.is_banned:
        return AccessDenied(f"this peer has been banned from the run: {removed.reason}")
    return PeerUnavailable(f"this peer has been removed from the run ({removed.reason}): join it again")


def _now() -> float:
    return asyncio.get_running_loop().time()
