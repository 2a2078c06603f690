"""A run that lasts for days: volunteers with home lines and nights off, whole stops and a bad batch, in virtual time.

The peers are real. They train a small language model, whose messages take as long as those of a large one would. What
the data teach is known exactly, and so is the lowest loss that any model can reach.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, nan
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarm_protocol.errors import PeerUnavailable
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.config import RollbackPolicy, TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.evaluation.policy import EvaluationHistory
from swarm_training.optim.local_steps import LocalSteps
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.saving import load_newest, save
from tests.worlds.runs import Board, SimulatedPeer, World

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
WORDS, BATCH = 32, 256
CONFIG = TrainingConfig(
    codec="2bit",
    chunk_elements=64,
    join_timeout_s=1800.0,
    restart_wait_s=600.0,
    gossip_s=480.0,
    heartbeat_s=480.0,
    silence_s=1080.0,
    straggler_s=600.0,
    max_meeting_s=1800.0,
    checkpoint_every=2,
    checkpoints_kept=3,
    rollback=RollbackPolicy(margin=1.0, patience=3, window=50, warmup=10),
)
_ZONES = 3  # of the earth, in which the volunteers live
_OUTAGE_S = 2 * HOUR_S  # from a whole stop until the run starts again
_DHT_S, _PUBLISHING_S = 120.0, 900.0
_SAVE_EVERY = 1  # steps
_LR = 0.003


@dataclass(frozen=True)
class WeekPlan:
    """What happens in a simulated run. Times are hours after its start.

    Attributes:
        parameters: of the model that the messages are as large as those of.
        round_h: how long a round takes when two thirds of the volunteers are there.
        stops_h: when all peers end at once; the run starts again two hours later.
        bad_batch_h: from when on the loss is not finite, until the run has gone back.
    """

    volunteers: int = 20
    days: float = 7.0
    parameters: int = 20_000_000
    round_h: float = 2.0
    stops_h: tuple[float, ...] = (40.0, 120.0)
    bad_batch_h: float = 80.0
    seed: int = 0

    @property
    def target(self) -> int:
        """The samples of a global batch."""
        speeds = [each.samples_per_s for each in volunteers(self)]
        return round(sum(speeds) * 2 / 3 * self.round_h * HOUR_S)


class Language:
    """Words of which each depends on the one before it, so that the best model and its loss are known."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(0)
        self._often = 1.0 / torch.arange(1, WORDS + 1)
        self._often /= self._often.sum()
        self._next = torch.softmax(1.5 * torch.randn(WORDS, WORDS, generator=chance), 1)  # [word, next word]
        self.lowest_loss = float((self._often[:, None] * self._next * -self._next.log()).sum())

    def loss(self, parameter: Tensor) -> float:
        """The loss that a model has on endless text. ``parameter``: [WORDS * WORDS] logits."""
        logarithms = functional.log_softmax(parameter.detach().view(WORDS, WORDS), 1)
        return float(-(self._often[:, None] * self._next * logarithms).sum())

    def gradient(self, parameter: Tensor, seed: int) -> tuple[Tensor, float]:
        """Of the loss of the batch that has this number, with that loss."""
        chance = torch.Generator().manual_seed(seed)
        words = torch.multinomial(self._often, BATCH, replacement=True, generator=chance)
        following = torch.multinomial(self._next[words], 1, generator=chance)[:, 0]
        logits = parameter.detach().view(WORDS, WORDS)[words]
        loss = functional.cross_entropy(logits, following)
        errors = torch.softmax(logits, 1)
        errors[torch.arange(BATCH), following] -= 1
        gradient = torch.zeros(WORDS, WORDS).index_add_(0, words, errors / BATCH)
        return gradient.view(-1), float(loss)


@dataclass(eq=False)
class Volunteer:
    """Attributes:
    samples_per_s: that its machine computes.
    up_bits_per_s, down_bits_per_s: what its line passes.
    asleep_h: when its night begins, hours after midnight, and how long it is.
    pending: the numbers of the batches since its last global step.
    """

    number: int
    samples_per_s: float
    up_bits_per_s: float
    down_bits_per_s: float
    asleep_h: tuple[float, float]
    pending: list[int] = field(default_factory=list)
    num_batches: int = 0
    computing_s: float = 0.0
    present_s: float = 0.0
    peer: SimulatedPeer | None = None

    def awake_until(self, time_s: float) -> float:
        """When it goes to sleep; the same time if it is asleep."""
        begin_h, length_h = self.asleep_h
        since_h = (time_s / HOUR_S - begin_h) % 24.0
        return time_s if since_h < length_h else time_s + (24.0 - since_h) * HOUR_S

    def asleep_until(self, time_s: float) -> float:
        begin_h, length_h = self.asleep_h
        return time_s + (length_h - (time_s / HOUR_S - begin_h) % 24.0) * HOUR_S


def volunteers(plan: WeekPlan) -> list[Volunteer]:
    """Half of the lines send 10 Mbit/s or less; machines differ by a factor of up to 8."""
    chance = random.Random(plan.seed)
    found = []
    for number in range(plan.volunteers):
        up = chance.choice((5e6, 10e6, 20e6, 40e6))
        night = (22.0 + 24.0 / _ZONES * (number % _ZONES) + chance.uniform(0, 1)) % 24, chance.uniform(6, 7)
        found.append(Volunteer(number, 2 ** chance.uniform(-1.5, 1.5), up, 5 * up, night))
    return found


class HomeLines:
    """How long the data of messages are on their way, each way of each line passing one message after the other."""

    def __init__(self, lines: Sequence[Volunteer], world: World, parameters: int) -> None:
        self._world = world
        self._lines, self._growth = lines, parameters / WORDS**2
        self._up_free_s: dict[str, float] = {}
        self._down_free_s: dict[str, float] = {}
        world.delay = self._delay_s

    def _delay_s(self, source: str, target: str, message: Any) -> float:
        chunk = message if isinstance(message, pb.Chunk) else None
        if isinstance(message, pb.ReduceRequest):
            chunk = message.row.chunk if message.HasField("row") else message.chunk
        if chunk is None or not chunk.data:
            return 0.0
        now = asyncio.get_running_loop().time()
        bits = 8 * len(chunk.data) * self._growth
        sender, receiver = (self._lines[self._world.peers[each].number] for each in (source, target))
        sent_s = max(now, self._up_free_s.get(source, 0.0)) + bits / sender.up_bits_per_s
        came_s = max(sent_s, self._down_free_s.get(target, 0.0) + bits / receiver.down_bits_per_s)
        self._up_free_s[source], self._down_free_s[target] = sent_s, came_s
        return came_s - now


@dataclass
class PatientBoard(Board):
    """A DHT whose calls take minutes, because most of the simulation would be calls of an idle DHT."""

    async def publish(self, record: pb.SignedProgress) -> None:
        self.records[self.own] = record
        await asyncio.sleep(_PUBLISHING_S)


class PatientWorld(World):
    """A world with such a DHT."""

    def board(self, own: str) -> Board:
        return PatientBoard(own, self.records, self.orders, _DHT_S)


@dataclass
class WeekResult:
    """What came of a simulated run.

    Attributes:
        final_states: the number of different states that the volunteers have at the end.
        differing: moments at which two peers had different parameters.
        steps, rollbacks: those of the run at its end; a start after a whole stop counts as a rollback.
        undone_steps: by rollback, the steps that were lost with it.
        loss, single_loss, lowest_loss: of the run, of one process after the same samples, and of the best model.
        loss_at_equal_time: of one process that has trained for as long as the run.
        seconds, single_s: how long the run and one process of the median speed have computed for these samples.
        computing: the share of their time in the run for which volunteers compute.
        lost_samples: the share of all computed samples that no average has.
    """

    final_states: int
    differing: list[Moment]
    steps: int
    rollbacks: int
    undone_steps: list[int]
    samples: int
    lost_samples: float
    loss: float
    single_loss: float
    lowest_loss: float
    loss_at_equal_time: float
    seconds: float
    single_s: float
    computing: float


class Week:
    """One simulated run after a plan; ``live`` is its whole life."""

    def __init__(self, plan: WeekPlan, disks: Path) -> None:
        """``disks``: a directory for the checkpoints of all volunteers, each with a folder of its own."""
        self.plan = plan
        self.volunteers = volunteers(plan)
        self._disks, self._chance = disks, random.Random(plan.seed)
        self._language = Language()
        self._world = World()
        self._everybody: list[SimulatedPeer] = []
        self._counted: dict[Moment, list[int]] = {}
        self._is_founded = self._has_saved = False
        self._bad_life: int | None = None  # the number of rollbacks when the bad batch came

    async def live(self) -> WeekResult:
        """The run from its start to the end of the last day, after which all come once more for two steps."""
        end_s = self.plan.days * DAY_S
        start_s = 0.0
        for stop_h in (*self.plan.stops_h, inf):
            await asyncio.sleep(max(0.0, start_s - _now()))
            self._begin()
            until_s = min(stop_h * HOUR_S, end_s)
            await asyncio.gather(*(self._take_part(each, until_s, stop_h) for each in self.volunteers))
            start_s = until_s + _OUTAGE_S
        seconds = _now()
        last = max(each.peer.state.step for each in self.volunteers if each.peer) + 2
        await asyncio.gather(*(self._end(each, last) for each in self.volunteers))
        return self._result(seconds)

    def _begin(self) -> None:
        """Nobody is there, and the DHT has forgotten the run."""
        self._world = PatientWorld()
        HomeLines(self.volunteers, self._world, self.plan.parameters)
        self._is_founded = False

    async def _take_part(self, volunteer: Volunteer, until_s: float, stop_h: float) -> None:
        """Whenever it is awake. Those that are there at a whole stop end without a goodbye."""
        while _now() < until_s:
            asleep_s = volunteer.awake_until(_now())
            if asleep_s == _now():
                await asyncio.sleep(min(volunteer.asleep_until(_now()), until_s) - _now())
                continue
            await self._take_part_for_a_day(volunteer, min(asleep_s, until_s))
            is_night = asleep_s <= until_s
            if is_night and self._chance.random() < 2 / 3:
                await self._leave(volunteer)
            elif is_night or stop_h < inf:
                self._kill(volunteer)

    async def _take_part_for_a_day(self, volunteer: Volunteer, until_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._enter(volunteer)
                while True:
                    await self._compute(volunteer)

    async def _end(self, volunteer: Volunteer, last_step: int) -> None:
        if volunteer.peer is None:
            await self._enter(volunteer)
        assert volunteer.peer is not None
        while volunteer.peer.state.step < last_step:
            await self._compute(volunteer)

    async def _leave(self, volunteer: Volunteer) -> None:
        peer, volunteer.peer = volunteer.peer, None
        volunteer.pending.clear()
        if peer is not None:
            await peer.peer.leave()
            for task in peer.tasks:
                task.cancel()

    def _kill(self, volunteer: Volunteer) -> None:
        peer, volunteer.peer = volunteer.peer, None
        volunteer.pending.clear()
        if peer is not None:
            self._world.kill(peer.peer_id)

    # ------------------------------------------------------------ one peer

    async def _enter(self, volunteer: Volunteer) -> None:
        """With the newest checkpoint on its disk, as ``TrainingRun`` does. Who comes first founds the run.

        After a whole stop that is the first one of those that have a checkpoint.
        """
        self._world.log.clear()  # a week of messages would fill the memory
        while volunteer.peer is None:
            peer = self._make(volunteer)
            disk = self._disk(volunteer)
            resumed_at = load_newest(peer.state, disk) if disk.exists() else None
            if not self._is_founded and (resumed_at is not None or not self._has_saved):
                self._is_founded = True
                volunteer.peer = peer
                await self._found(peer, resumed_at)
                continue
            with suppress(PeerUnavailable):
                await self._join(volunteer, peer, resumed_at)
        self._everybody.append(volunteer.peer)

    def _make(self, volunteer: Volunteer) -> SimulatedPeer:
        self._world.dead.difference_update(
            {peer for peer, each in self._world.peers.items() if each.number == volunteer.number}
        )
        peer = SimulatedPeer.make(
            self._world,
            volunteer.number,
            target=self.plan.target,
            size=WORDS**2,
            config=CONFIG,
            encoder=ErrorFeedback(codec_of(CONFIG.codec)),
            optimizer=_outer,
            local=lambda parameter: LocalSteps(_inner(parameter), BATCH),
        )
        return peer

    async def _found(self, peer: SimulatedPeer, resumed_at: Moment | None) -> None:
        peer.peer.start()
        if resumed_at is None:
            await peer.peer.found(peer.state.digest())
        else:
            await peer.drive(peer.share.found(resumed_at, [], EvaluationHistory()))
        peer.note()

    async def _join(self, volunteer: Volunteer, peer: SimulatedPeer, resumed_at: Moment | None) -> None:
        """The state of the others comes over its line, unless its own is the newest."""
        await peer.peer.find_others()
        peer.peer.start()
        volunteer.peer = peer
        if resumed_at is None:
            await asyncio.sleep(96 * self.plan.parameters / volunteer.down_bits_per_s)  # with the outer momentum
        else:
            await peer.peer.offer_state(resumed_at, peer.state.digest())
        while not peer.peer.own.state_digest:
            await peer.drive(peer.share.load())
        peer.peer.withdraw_offers()
        peer.note()

    async def _compute(self, volunteer: Volunteer) -> None:
        """One batch, and what follows from it."""
        peer, start_s = volunteer.peer, _now()
        assert peer is not None
        await asyncio.sleep(BATCH / volunteer.samples_per_s)
        volunteer.computing_s += _now() - start_s
        number = volunteer.number + 1000 * volunteer.num_batches
        volunteer.num_batches += 1
        volunteer.pending.append(number)
        gradient, loss = self._language.gradient(peer.parameter, number)
        if self._is_bad(peer.state.moment):
            gradient, loss = gradient * nan, nan
        moment = peer.state.moment
        peer.given.pop(moment.step + 1, None)
        try:
            await peer.step(gradient, BATCH, loss)
        finally:
            self._note(volunteer, peer, moment)
            volunteer.present_s += _now() - start_s
        if peer.state.moment != moment and peer.state.step % _SAVE_EVERY == 0:
            self._has_saved = True
            save(peer.state, peer.peer.rollbacks.went_back_to, self._disk(volunteer), keep=2)

    def _is_bad(self, moment: Moment) -> bool:
        if _now() < self.plan.bad_batch_h * HOUR_S:
            return False
        if self._bad_life is None:
            self._bad_life = moment.rollbacks
        return moment.rollbacks == self._bad_life

    def _note(self, volunteer: Volunteer, peer: SimulatedPeer, moment: Moment) -> None:
        """Which batches were averaged at this moment."""
        if peer.given.get(moment.step + 1) and peer.state.moment > moment:
            self._counted.setdefault(moment, []).extend(volunteer.pending)
        if not peer.share.samples:
            volunteer.pending.clear()

    def _disk(self, volunteer: Volunteer) -> Path:
        return self._disks / str(volunteer.number)

    # ------------------------------------------------------------ afterwards

    def _result(self, seconds: float) -> WeekResult:
        peers = [each.peer for each in self.volunteers if each.peer is not None]
        moments = {moment for peer in self._everybody for moment in peer.moments}
        begun = {life: min(m.step for m in moments if m.rollbacks == life) for life in {m.rollbacks for m in moments}}
        ended = {life: max(m.step for m in moments if m.rollbacks == life) for life in begun}
        counted = [
            number
            for moment, numbers in sorted(self._counted.items())
            if all(moment.step < step for life, step in begun.items() if life > moment.rollbacks)
            for number in numbers
        ]
        speed = median(each.samples_per_s for each in self.volunteers)
        losses = self._single(counted, round(seconds * speed / BATCH))
        computed = BATCH * sum(each.num_batches for each in self.volunteers)
        return WeekResult(
            final_states=len({peer.state.digest() for peer in peers}),
            differing=sorted(filter(partial(_differs, self._everybody), moments)),
            steps=peers[0].state.step,
            rollbacks=peers[0].state.moment.rollbacks,
            undone_steps=[ended[life - 1] - step for life, step in sorted(begun.items()) if life - 1 in ended],
            samples=BATCH * len(counted),
            lost_samples=1 - BATCH * sum(map(len, self._counted.values())) / computed,
            loss=self._language.loss(peers[0].state.shared_parameters[0]),
            single_loss=losses[0],
            lowest_loss=self._language.lowest_loss,
            loss_at_equal_time=losses[1],
            seconds=seconds,
            single_s=BATCH * len(counted) / speed,
            computing=sum(each.computing_s for each in self.volunteers)
            / sum(each.present_s for each in self.volunteers),
        )

    def _single(self, numbers: Sequence[int], in_equal_time: int) -> tuple[float, float]:
        """The losses of one process after all of these batches, and after the first ones of them."""
        parameter = torch.nn.Parameter(torch.zeros(WORDS**2))
        optimizer, early = _inner(parameter), 0.0
        for count, number in enumerate(numbers, 1):
            parameter.grad, _ = self._language.gradient(parameter, number)
            optimizer.step()
            if count == min(in_equal_time, len(numbers)):
                early = self._language.loss(parameter)
        return self._language.loss(parameter), early


def _inner(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter], lr=_LR, weight_decay=0.0)


def _outer(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _differs(peers: Sequence[SimulatedPeer], moment: Moment) -> bool:
    there = [peer.moments[moment] for peer in peers if moment in peer.moments]
    return not all(torch.equal(there[0], other) for other in there)


def _now() -> float:
    return asyncio.get_running_loop().time()
