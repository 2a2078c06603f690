"""Peers of a run in one event loop with its own clock: the real code over a network that fails on command."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_training.compression.compressor import Plain
from swarm_training.core.config import TrainingConfig
from swarm_training.core.local_stream import LocalStream, stream_pair
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, Progress
from swarm_training.evaluation.evaluation import Evaluation
from swarm_training.ledger.orders import Orders
from swarm_training.meeting.attending import Averaged
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.share import GradientAccumulator, make_share
from swarm_training.run.state import TrainedState
from tests.worlds.identities import identity
from tests.worlds.virtual_time import at_once, run_virtually

CONFIG = TrainingConfig(chunk_elements=4, join_timeout_s=30.0)


class World:
    """Attributes:
    cut: pairs of peer ids between which nothing passes.
    log: what has been sent, as (time, from, to, kind).
    delay: by source, target and message, how many seconds longer it takes.
    """

    def __init__(self, latency_s: float = 0.01) -> None:
        self.latency_s = latency_s
        self.peers: dict[str, SimulatedPeer] = {}
        self.records: dict[str, pb.SignedProgress] = {}
        self.orders: list[bytes] = []  # on the DHT
        self.dead: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        self.log: list[tuple[float, str, str, str]] = []
        self.on_message: Callable[[str, str, Any], None] = lambda source, target, message: None
        self.delay: Callable[[str, str, Any], float] = lambda source, target, message: 0.0
        self.streams: list[tuple[str, str, LocalStream[Any, Any]]] = []

    def board(self, own: str) -> Board:
        return Board(own, self.records, self.orders)

    def passes(self, source: str, target: str) -> bool:
        return frozenset((source, target)) not in self.cut

    def isolate(self, *peers: str) -> None:
        """Nothing passes between these and the others, and nobody is told."""
        self.cut |= {frozenset((a, b)) for a in peers for b in self.peers if b not in peers}

    def fail_at_message(self, number: int, victims: Sequence[SimulatedPeer], failure: str) -> list[SimulatedPeer]:
        """At the ``number``-th message from now on, to or from one of these peers: kill them, isolate them, or isolate
        them for a while (``pause``). They are in the list that is returned once that has happened."""
        loop, ids, failed = asyncio.get_running_loop(), [peer.peer_id for peer in victims], list[SimulatedPeer]()
        left = [number]

        def strike(source: str, target: str, _message: Any) -> None:
            left[0] -= source in ids or target in ids
            if left[0] or failed:
                return
            failed.extend(victims)
            if failure == "kill":
                for peer_id in ids:
                    loop.call_soon(self.kill, peer_id)
            else:
                self.isolate(*ids)
            if failure == "pause":
                loop.call_later(8.0, self.cut.clear)

        self.on_message = strike
        return failed

    def kill(self, peer_id: str) -> None:
        """Connections break, and its address refuses others."""
        self.dead.add(peer_id)
        peer = self.peers[peer_id]
        for task in (*peer.tasks, *peer.peer._tasks):
            task.cancel()
        for source, target, stream in self.streams:
            if peer_id in (source, target):
                stream.break_off()


@dataclass
class _Link:
    """A stream whose messages take time, or do not arrive."""

    world: World
    source: str
    target: str
    inner: LocalStream[Any, Any]
    _on_way: deque[Any] = field(default_factory=deque)
    _delay_s: float = 0.0  # of the last message; nothing overtakes it

    async def send(self, message: Any) -> None:
        if self.inner.is_broken or self.source in self.world.dead:
            raise PeerUnavailable("the stream is broken")
        self.world.on_message(self.source, self.target, message)
        kind = message.WhichOneof("kind") if "kind" in message.DESCRIPTOR.oneofs_by_name else type(message).__name__
        now = asyncio.get_running_loop().time()
        self.world.log.append((now, self.source, self.target, kind))
        if self.world.passes(self.source, self.target):
            self._deliver(message)

    def _deliver(self, message: Any) -> None:
        self._on_way.append(message)
        if message is not None:
            self._delay_s = max(self._delay_s, self.world.delay(self.source, self.target, message))
        asyncio.get_running_loop().call_later(self.world.latency_s + self._delay_s, self._arrive)

    def _arrive(self) -> None:
        message = self._on_way.popleft()  # timers of one moment fire in any order
        if not self.inner.is_broken:
            self.inner._outbox.put_nowait(message)

    async def receive(self) -> Any:
        return await self.inner.receive()

    async def finish(self) -> None:
        if self.world.passes(self.source, self.target):
            self._deliver(None)


@dataclass
class SimulatedNetwork:
    world: World
    own: str

    async def _reach(self, peer: Progress) -> SimulatedPeer:
        await asyncio.sleep(self.world.latency_s)
        if peer.peer_id in self.world.dead or self.own in self.world.dead:
            raise PeerUnavailable("connection refused")
        if not self.world.passes(self.own, peer.peer_id):
            await asyncio.sleep(3.0)
            raise PeerUnavailable("no answer")
        return self.world.peers[peer.peer_id]

    async def exchange(self, peer: Progress, request: pb.ExchangeRequest) -> pb.ExchangeReply:
        called = await self._reach(peer)
        self.world.log.append((asyncio.get_running_loop().time(), self.own, peer.peer_id, "exchange"))
        return await called.peer.exchange(self.own, request)

    def meet(self, peer: Progress) -> Any:
        return self._stream(peer, "meet", pb.MeetRequest, pb.MeetReply)

    def reduce(self, peer: Progress) -> Any:
        return self._stream(peer, "reduce", pb.ReduceRequest, pb.Chunk)

    @asynccontextmanager
    async def _stream(self, peer: Progress, kind: str, out: type, into: type) -> AsyncIterator[_Link]:
        called = await self._reach(peer)
        near, far = stream_pair(out, into)
        entry = (self.own, peer.peer_id, near)
        self.world.streams.append(entry)

        async def serve() -> None:
            try:
                link = _Link(self.world, peer.peer_id, self.own, far)
                await getattr(called.peer, kind)(self.own, link)
                await link.finish()
            except (SwarmError, ValueError, TimeoutError):
                near.break_off()

        serving = asyncio.ensure_future(serve())
        called.tasks.append(serving)
        try:
            yield _Link(self.world, self.own, peer.peer_id, near)
        finally:
            if self.world.passes(self.own, peer.peer_id):
                near.break_off()
            self.world.streams.remove(entry)

    async def fetch(self, peer: Progress, request: pb.FetchRequest) -> AsyncIterator[pb.Chunk]:
        called = await self._reach(peer)
        self.world.on_message(self.own, peer.peer_id, request)
        async for chunk in called.peer.fetch(self.own, request):
            await asyncio.sleep(self.world.latency_s)
            await self._reach(peer)
            yield chunk

    async def state(self, peer: Progress, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        called = await self._reach(peer)
        async for part in called.peer.state(self.own, request):
            await self._reach(peer)
            yield part

    async def rounds(self, peer: Progress, request: pb.RoundsRequest) -> pb.RoundsReply:
        called = await self._reach(peer)
        self.world.log.append((asyncio.get_running_loop().time(), self.own, peer.peer_id, "rounds"))
        return await called.peer.rounds(self.own, request)

    async def is_gone(self, peer: Progress) -> bool:
        return peer.peer_id in self.world.dead


@dataclass
class Board:
    """The DHT of one run, as the peer ``own`` sees it: dictionaries that answer after a while."""

    own: str
    records: dict[str, pb.SignedProgress]
    orders: Sequence[bytes] = ()
    latency_s: float = 0.5

    async def publish(self, record: pb.SignedProgress) -> None:
        await asyncio.sleep(self.latency_s)
        self.records[self.own] = record

    async def read(self) -> list[pb.SignedProgress]:
        await asyncio.sleep(self.latency_s)
        return list(self.records.values())

    async def read_orders(self) -> list[bytes]:
        await asyncio.sleep(self.latency_s)
        return list(self.orders)


@dataclass(eq=False)
class SimulatedPeer:
    """One peer with a tiny model.

    Attributes:
        history: by step, the parameters after it.
        moments: by moment, the parameters at it.
        groups: by step, how many averaged for it.
        given: by step, the samples with which this peer was in the meeting that led to it.
        continued: steps whose result was taken over from an earlier group.
    """

    world: World
    number: int
    peer: TrainingPeer
    state: TrainedState
    share: GradientAccumulator
    parameter: torch.nn.Parameter
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    history: dict[int, torch.Tensor] = field(default_factory=dict)
    moments: dict[Moment, torch.Tensor] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    given: dict[int, int] = field(default_factory=dict)
    continued: set[int] = field(default_factory=set)

    @classmethod
    def make(
        cls,
        world: World,
        number: int,
        *,
        target: int,
        size: int = 37,
        shape: tuple[int, ...] | None = None,
        config: TrainingConfig = CONFIG,
        compressor: Callable[[int], Any] | None = None,
        encoder: Any = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        orders: Callable[[int], Orders | None] = lambda _number: None,
        local: Callable[[torch.nn.Parameter], LocalSteps | None] = lambda _parameter: None,
        evaluation: Callable[[torch.nn.Parameter], Evaluation | None] = lambda _parameter: None,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]] = at_once,
    ) -> SimulatedPeer:
        own = identity(number)
        parameter = torch.nn.Parameter(torch.full(shape or (size,), float(number)))
        compressor = compressor(number) if compressor else Plain()
        steps, evaluated = local(parameter), evaluation(parameter)
        if evaluated is not None:
            config = replace(config, evaluation=evaluated.policy)
            evaluated.bind([parameter])
        common = config.common | ({} if steps is None else steps.common)
        outer = optimizer([parameter], lr=0.1)
        max_norm = config.max_norm if steps is None else 0.0
        state = TrainedState([parameter], outer, compressor, common, max_norm, steps is not None, config.average_decay)
        record = Progress(
            "toy",
            own.peer_id,
            state=JOINING,
            target_batch_size=target,
            address="" if config.client_mode else f"sim:{number}",
            share=0.0 if config.client_mode else config.share,
            model=state.model_digest,
        )
        peer = TrainingPeer(
            config,
            SwarmAccess(own),
            record,
            Environment(
                SimulatedNetwork(world, own.peer_id), world.board(own.peer_id), in_thread, random.Random(number)
            ),
            state,
            GradientCompression(compressor, encoder),
            orders(number),
        )
        share = make_share(peer, state, config, steps, evaluated)
        made = cls(world, number, peer, state, share, parameter)
        world.peers[own.peer_id] = made
        return made

    @property
    def peer_id(self) -> str:
        return self.peer.own.peer_id

    @property
    def is_dead(self) -> bool:
        return self.peer_id in self.world.dead

    async def enter(self) -> None:
        if len(self.world.peers) == 1:
            self.peer.start()
            await self.peer.found(self.state.digest())
            return
        await self.peer.find_others()
        self.peer.start()
        while not self.peer.own.state_digest:
            await self.drive(self.share.load())
        self.note()

    def note(self) -> None:
        self.history[self.state.step] = self.state.shared_parameters[0].detach().clone()
        if self.peer.own.state_digest:  # it has joined
            self.moments[self.state.moment] = self.history[self.state.step]

    async def step(self, gradient: torch.Tensor, samples: int, loss: float | None = None) -> None:
        self.parameter.grad = gradient.clone()
        self.share.add(samples, loss)
        await self.drive(self.share.report())

    async def drive(self, asking: Any) -> None:
        answer: Any = None
        try:
            while True:
                answer = await asking.send(answer)
                if isinstance(answer, Averaged):
                    step = self.state.step + 1
                    self.groups[step] = len(answer.group.members)
                    self.given[step] = self.share.samples
                    self.continued |= {step} if answer.group.continues else set()
                self.note()
        except StopIteration:
            self.note()
        finally:
            asking.close()

    async def train(self, seconds_per_call: float, samples: int, until_step: int) -> None:
        """Gradients are noise that depends on the peer and the call."""
        generator = torch.Generator().manual_seed(self.number)
        while self.state.step < until_step:
            await asyncio.sleep(seconds_per_call)
            await self.step(torch.randn(self.parameter.shape, generator=generator), samples)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self.tasks.append(task)
        return task


def simulate(scenario: Callable[[], Awaitable[Any]], limit_s: float = 600.0) -> Any:
    """Runs it in virtual time, of which it may take so much."""
    return run_virtually(scenario(), limit_s)


async def enter_all(world: World, count: int, **options: Any) -> list[SimulatedPeer]:
    peers = [SimulatedPeer.make(world, 0, **options)]
    await peers[0].enter()
    peers += [SimulatedPeer.make(world, number, **options) for number in range(1, count)]
    await asyncio.gather(*(peer.enter() for peer in peers[1:]))
    return peers


async def all_done(tasks: list[asyncio.Task[Any]]) -> None:
    """Raises what the first of them has raised, if it was not cancelled."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        if not task.cancelled():
            task.result()
    if len(done) < len(tasks):
        await all_done([task for task in tasks if not task.done()])


def gradient_at(parameter: torch.Tensor, number: int) -> torch.Tensor:
    """Of the loss of peer ``number``: a quadratic around a point of its own."""
    target = torch.randn(37, generator=torch.Generator().manual_seed(number))
    return torch.linspace(0.5, 2.0, 37) * (parameter.detach() - target)


def require_equal(peers: list[SimulatedPeer]) -> None:
    """At all moments that several of them have come to."""
    for moment in {moment for peer in peers for moment in peer.moments}:
        there = [peer.moments[moment] for peer in peers if moment in peer.moments]
        assert all(torch.equal(there[0], other) for other in there), moment


def require_equal_steps(peers: list[SimulatedPeer], steps: int) -> None:
    """After each of so many steps, at which one of them was at least."""
    for step in range(1, steps + 1):
        histories = [peer.history[step] for peer in peers if step in peer.history]
        assert histories and all(torch.equal(histories[0], other) for other in histories), f"step {step}"


@dataclass
class UnluckyPeer:
    """One whose first averaging fails, and whose second is the mean of all peers, of which it is the only one."""

    given: list[torch.Tensor] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)
    may_meet: bool = True

    async def measure(self, computed: int) -> None:
        pass

    async def report(self, samples: int, loss: float, loss_samples: int) -> None:
        self.reported.append(samples)

    async def is_due(self) -> bool:
        return self.may_meet

    async def is_lost(self) -> bool:
        return False

    async def average(self, gradient: torch.Tensor) -> None:
        self.given.append(gradient)
        self.may_meet = False

    async def start_averaging(self, gradient: torch.Tensor) -> None:
        await self.average(gradient)

    async def averaged(self) -> None:
        """There is no average."""

    async def has_averaged(self) -> bool:
        return False


def drive(asking: Any) -> None:
    """Give what ``asking`` waits for, until it has ended."""
    answer = None
    with suppress(StopIteration):
        while True:
            answer = asyncio.run(asking.send(answer))
