"""A run in stages in one event loop with its own clock: real peers over a network that fails on command.

The model is a chain of small layers. What micro-batch m of step t is follows from both; ``single`` trains on the same
in one process. A trainer takes micro-batches through the stages as it should, and nothing more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.errors import PeerMoved, PeerUnavailable, SwarmError
from swarm_training.compression.compressor import Plain
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.core.callbacks import InThread
from swarm_training.core.config import RollbackPolicy, TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, Progress
from swarm_training.optim.local_steps import LocalSteps, outer_optimizer
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.standing import now
from swarm_training.run.state import TrainedState
from swarm_training.stages.peer.placing import Announcements, PlacementTimes, StageChooser, choose
from swarm_training.stages.peer.replicas import Replicas
from swarm_training.stages.peer.shared import SharedGradients, spans_of
from swarm_training.stages.peer.stage_peer import OwnStage, StagePeer
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.routing.barrier import skipped_batches
from swarm_training.stages.routing.coverage import lacking
from swarm_training.stages.routing.run_stages import stage_run
from tests.worlds.identities import identity
from tests.worlds.runs import SimulatedNetwork, World
from tests.worlds.toy_stages import ToyGradients, exact
from tests.worlds.virtual_time import at_once

HIDDEN, ROWS = 6, 3
_TRAINER = "trainer"  # all of them, to the network
CONFIG = TrainingConfig(
    counting="exact", codec="fp64", chunk_elements=16, checkpoint_every=2, checkpoints_kept=8, rollback=RollbackPolicy()
)


HELD_OUT = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1))
EVALUATION_S = 4.0  # that held-out data take through one stage; a step takes less than a second


def held_out_loss(stages: Sequence[Sequence[Tensor]]) -> float:
    """The mean loss that one plain process has with the parameters of all stages."""
    hidden = HELD_OUT
    for weight, bias in stages:
        hidden = torch.tanh(hidden @ weight.T + bias)
    return float(((hidden - 0.5) ** 2).sum()) / len(HELD_OUT)


def micro_batch(step: int, m: int) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(7919 * step + m))


class ToyStage:
    """One layer; the last stage has the loss, a sum over elements. If tied, its matrix is that of the first stage."""

    def __init__(self, index: int, num_stages: int, tied: bool = False) -> None:
        self.is_last = index == num_stages - 1
        generator = torch.Generator().manual_seed(0 if tied and self.is_last else index)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        self.parameters = list(self.layer.parameters())
        names = [name for name, _ in self.layer.named_parameters()]
        is_shared = tied and index in (0, num_stages - 1)
        self.shared = spans_of(names, self.parameters, {"weight"} if is_shared else ())

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.tanh(self.layer(inputs))

    def loss_sum(self, hidden: Tensor) -> Tensor:
        return ((torch.tanh(hidden) - 0.5) ** 2).sum()

    def backward(self, inputs: Tensor, grad: Tensor | None) -> ToyGradients:
        inputs = inputs.detach().requires_grad_(True)
        output = torch.tanh(self.layer(inputs))
        loss = self.loss_sum(self.layer(inputs)) if self.is_last else None
        *parameters, of_inputs = torch.autograd.grad(output if loss is None else loss, [*self.parameters, inputs], grad)
        return ToyGradients(of_inputs, parameters, None if loss is None else float(loss.detach()), ROWS)


class ToySums:
    """What an ``Accumulator`` offers, as simply as it goes. Gradients are rounded so that their sums are exact."""

    def __init__(self, stage: ToyStage) -> None:
        self.step = 0
        self._length = sum(parameter.numel() for parameter in stage.parameters)
        self.clear(0)

    @property
    def sums(self) -> Tensor:
        return self._sums.clone()

    def add(self, step: int, m: int, trainer: str, gradients: Sequence[Tensor]) -> None:
        if step != self.step:
            raise PeerMoved("another step")
        self._pending[m, trainer] = exact(gradients)

    def commit(self, step: int, m: int, trainer: str) -> bool:
        if (gradient := self._pending.pop((m, trainer), None)) is None:
            return False
        self._sums += gradient
        self.num_summed += 1
        return True

    def take(self) -> tuple[Tensor, int]:
        taken = self._sums, self.num_summed
        ToySums.discard(self)
        return taken

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(m for m, _ in self._pending)

    def drop(self, m: int) -> None:
        self._pending = {key: each for key, each in self._pending.items() if key[0] != m}

    def clear(self, next_step: int) -> None:
        self.step = next_step
        self._pending: dict[tuple[int, str], Tensor] = {}
        self.discard()

    def discard(self) -> None:
        self._sums, self.num_summed = torch.zeros(self._length, dtype=torch.float64), 0


def optimizer_of(stage: ToyStage) -> torch.optim.Optimizer:
    return torch.optim.Adam(stage.parameters, lr=0.02)


def single(
    num_stages: int,
    num_micro_batches: int,
    steps: int,
    tied: bool = False,
    batch_of: Callable[[int], int] = lambda step: step,
    max_norm: float = 0.0,
) -> list[list[list[Tensor]]]:
    """By step and stage, the parameters of a training in one process, from step 0 on."""
    stages = [ToyStage(index, num_stages, tied) for index in range(num_stages)]
    optimizers = [optimizer_of(stage) for stage in stages]
    history = []
    for step in range(steps + 1):
        history.append([[parameter.detach().clone() for parameter in stage.parameters] for stage in stages])
        sums = [torch.zeros(sum(p.numel() for p in stage.parameters), dtype=torch.float64) for stage in stages]
        for m in range(num_micro_batches):
            inputs, grad = [micro_batch(batch_of(step), m)], None
            for stage in stages[:-1]:
                inputs.append(stage.forward(inputs[-1]))
            for index in reversed(range(num_stages)):
                gradients = stages[index].backward(inputs[index], grad)
                sums[index] += exact(gradients.parameters)
                grad = gradients.inputs
        if tied:
            ((start, stop),) = stages[0].shared
            sums[0][start:stop] += sums[-1][start:stop]
            sums[-1][start:stop] = sums[0][start:stop]
        scale = _clip_scale(stages, [each / num_micro_batches for each in sums], max_norm) if max_norm else 1.0
        for stage, optimizer, total in zip(stages, optimizers, sums, strict=True):
            at = 0
            for parameter in stage.parameters:
                mean = total[at : at + parameter.numel()] / num_micro_batches
                parameter.grad = (mean * scale).view(parameter.shape).float()
                at += parameter.numel()
            optimizer.step()
    return history


def _clip_scale(stages: Sequence[ToyStage], means: Sequence[Tensor], max_norm: float) -> float:
    """As torch clips gradients; parameters that the last stage shares with the first are no others."""
    own_of_last = means[-1].clone()
    for start, stop in stages[-1].shared:
        own_of_last[start:stop] = 0.0
    norm = float(torch.cat([*means[:-1], own_of_last]).norm())
    assert norm > max_norm, "nothing is clipped"
    return max_norm / (norm + 1e-6)


@dataclass(eq=False)
class SimulatedStagePeer:
    """Attributes:
    history: by moment, the parameters then.
    """

    world: StageWorld
    number: int
    stage: ToyStage
    stage_peer: StagePeer
    state: TrainedState
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    history: dict[Moment, list[Tensor]] = field(default_factory=dict)

    @property
    def peer(self) -> TrainingPeer:
        """For ``SimulatedNetwork``."""
        return self.stage_peer.peer

    @property
    def peer_id(self) -> str:
        return self.peer.own.peer_id

    def note(self) -> None:
        if self.peer.own.state_digest:
            self.history[self.state.moment] = [each.detach().clone() for each in self.state.shared_parameters]

    async def held_out_loss(self, moment: Moment) -> tuple[float, int]:
        """Of the last stage, which takes the held-out data through those before it."""
        self.world.begun_evaluations.append((moment, self.peer_id))
        hidden = HELD_OUT
        for index in range(self.world.num_stages - 1):
            while not (there := [peer for peer in self.world.alive(index) if peer.state.moment == moment]):
                await asyncio.sleep(0.1)
            hidden = await there[0].call(partial(there[0].forward, moment.step, hidden), EVALUATION_S)
        self._at(moment.step)
        return float(self.stage.loss_sum(self.stage.layer(hidden)).detach()) / len(hidden), len(hidden)

    async def call(self, function: Callable[[], Any], took_s: float) -> Any:
        """What a trainer asks for; the answer comes only if this peer is still there."""
        await self.world.pass_to(self.peer_id)
        await asyncio.sleep(took_s)
        await self.world.pass_to(self.peer_id)
        result = function()
        result = await result if asyncio.iscoroutine(result) else result
        await self.world.pass_to(self.peer_id)
        return result

    def _at(self, step: int) -> None:
        if self.stage_peer.step != step:
            raise PeerMoved(f"this peer is at step {self.stage_peer.step}")

    def forward(self, step: int, inputs: Tensor) -> Tensor:
        self._at(step)
        return self.stage.forward(inputs)

    def backward(self, step: int, m: int, trainer: str, inputs: Tensor, grad: Tensor | None) -> Tensor:
        self._at(step)
        gradients = self.stage.backward(inputs, grad)
        self.stage_peer.counting.add(step, m, trainer, gradients)
        return gradients.inputs


class StageWorld(World):
    """Stages of a run, each a run of its own.

    Attributes:
        local, outer: the local steps of a peer, if there are any, and the optimizer that steps with their average.
        sums: makes the sums of a peer.
        encoder: makes what a peer remembers of the codec's losses.
        compute: makes a peer's compute thread.
    """

    local: Callable[[ToyStage], LocalSteps] | None = None
    outer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = staticmethod(outer_optimizer)
    sums: Callable[[ToyStage], ToySums] = ToySums
    encoder: Callable[[], ErrorFeedback | None] = staticmethod(lambda: None)
    compute: Callable[[], InThread] = staticmethod(lambda: at_once)

    def __init__(
        self,
        num_stages: int,
        num_micro_batches: int,
        config: TrainingConfig = CONFIG,
        tied: bool = False,
        replicates: bool = True,
    ) -> None:
        """``replicates``: peers of the next stage keep checkpoints too."""
        super().__init__()
        self.replicates = replicates
        self.tied = tied
        self.num_stages, self.num_micro_batches, self.config = num_stages, num_micro_batches, config
        self.runs = [stage_run("toy", index) for index in range(num_stages)]
        self.everybody: dict[str, SimulatedStagePeer] = {}
        self.choosing: list[asyncio.Task[None]] = []
        self.begun_evaluations: list[tuple[Moment, str]] = []
        self.former: list[SimulatedStagePeer] = []  # what those who have moved were before
        self._noting: asyncio.Task[None] | None = None

    def alive(self, index: int | None = None) -> list[SimulatedStagePeer]:
        return [
            peer
            for peer in self.everybody.values()
            if peer.peer_id not in self.dead and index in (None, peer.stage_peer.index)
        ]

    def make(self, index: int, number: int | None = None, disk: Path | None = None) -> SimulatedStagePeer:
        """``disk``: for its checkpoints."""
        number = len(self.everybody) if number is None else number
        own, config = identity(number), replace(self.config, lasting_directory=disk)
        stage = ToyStage(index, self.num_stages, self.tied)
        local = None if self.local is None else self.local(stage)
        state = TrainedState(
            stage.parameters,
            optimizer_of(stage) if local is None else self.outer(stage.parameters),
            Plain(),
            config.common | ({} if local is None else local.common),
            config.max_norm,
            drifts=local is not None,
            average_decay=config.average_decay,
        )
        network, board, rng = SimulatedNetwork(self, own.peer_id), self.board(own.peer_id), random.Random(number)
        record = Progress(
            self.runs[index],
            own.peer_id,
            state=JOINING,
            target_batch_size=self.num_micro_batches,
            address=f"sim:{number}",
            model=state.model_digest,
        )
        peer = TrainingPeer(
            config,
            SwarmAccess(own),
            record,
            Environment(network, board, at_once, random.Random(number)),
            state,
            GradientCompression(Plain(), self.encoder()),
        )
        others = {stage: board for stage in range(self.num_stages) if stage != index}
        mates = {index: lambda: [*peer.view().all, *peer.table.heard(now(), {JOINING})]}
        watch = RunWatch(self.runs, network, others, config.silence_s, rng, mates)
        replicas = Replicas(index, self.num_stages if self.replicates else 1, peer, watch, network, at_once)
        sums = self.sums(stage)
        other = self.num_stages - 1 - index
        shared = SharedGradients(other, stage.shared, peer, watch, network, at_once) if stage.shared else None
        stage_peer = StagePeer(
            OwnStage(index, state, sums, local), peer, watch, replicas, config.codec, self.compute(), at_once, shared
        )
        made = SimulatedStagePeer(self, number, stage, stage_peer, state)
        stage_peer.evaluation.compute_by(made.held_out_loss)
        self.peers[own.peer_id] = made  # type: ignore[assignment]
        self.everybody[own.peer_id] = made
        return made

    def spawn(self, made: SimulatedStagePeer) -> None:
        """It founds its stage, or joins it, and takes part until it is killed."""

        async def live() -> None:
            await made.stage_peer.join()
            await made.stage_peer.run()

        made.tasks += [asyncio.ensure_future(coroutine) for coroutine in (live(), made.stage_peer.watch.run())]
        if self._noting is None:
            self._noting = asyncio.ensure_future(self._note())

    async def _note(self) -> None:
        """Has what all peers have at any moment in their histories: one task, since it wakes up so often."""
        while True:
            for peer in self.alive():
                peer.note()
            await asyncio.sleep(0.005)

    def join(self, index: int, disk: Path | None = None) -> SimulatedStagePeer:
        made = self.make(index, disk=disk)
        self.spawn(made)
        return made

    def join_where_it_helps(self, pace: PlacementTimes, index: int | None = None) -> int:
        """Somebody who is free to move: begins at a stage, or chooses one. Returns its number."""
        number = len(self.everybody) + sum(not task.done() for task in self.choosing)
        own, costs = identity(number), [1.0] * self.num_stages
        if index is not None:
            self._spawn_free(self.make(index, number), pace, costs)
            return number

        async def choose_and_live() -> None:
            boards = {stage: self.board(own.peer_id) for stage in range(self.num_stages)}
            network, rng = SimulatedNetwork(self, own.peer_id), random.Random(number)
            watch = RunWatch(self.runs, network, boards, self.config.silence_s, rng)
            watching = asyncio.ensure_future(watch.run())
            chosen = await choose(watch, Announcements(boards, self.runs, own), own.peer_id, costs, pace)
            watching.cancel()
            self._spawn_free(self.make(chosen, number), pace, costs)

        self.choosing.append(asyncio.ensure_future(choose_and_live()))
        return number

    def _spawn_free(self, made: SimulatedStagePeer, pace: PlacementTimes, costs: list[float]) -> None:
        self.spawn(made)

        async def move() -> None:
            while not made.peer.own.state_digest:
                await asyncio.sleep(0.1)
            to = await StageChooser(made.stage_peer, costs, pace, random.Random(made.number).uniform).next_stage()
            self.former.append(made)
            for task in made.tasks:
                if task is not asyncio.current_task():
                    task.cancel()
            await made.peer.leave()
            self._spawn_free(self.make(to, made.number), pace, costs)

        made.tasks.append(asyncio.ensure_future(move()))

    def isolate(self, *peers: str) -> None:
        """From trainers too."""
        super().isolate(*peers)
        self.cut |= {frozenset((peer, _TRAINER)) for peer in peers}

    async def pass_to(self, peer_id: str) -> None:
        """A trainer's message, one way."""
        await asyncio.sleep(self.latency_s)
        if peer_id in self.dead or not self.passes(peer_id, _TRAINER):
            raise PeerUnavailable("connection refused")

    async def reach(self, step: int, limit_s: float = 600.0) -> None:
        """Until every living peer has taken so many steps."""
        async with asyncio.timeout(limit_s):
            while not all(self.alive(i) for i in range(self.num_stages)) or any(
                peer.peer.own.step < step for peer in self.alive()
            ):
                await asyncio.sleep(0.1)


class ToyTrainer:
    """Takes what lacks through the stages, several micro-batches at a time."""

    def __init__(self, world: StageWorld, name: str = "trainer", seed: int = 0, at_a_time: int = 4) -> None:
        self.world, self.name, self.rng = world, name, random.Random(seed)
        boards = {index: world.board(name) for index in range(world.num_stages)}
        network = SimulatedNetwork(world, _TRAINER)
        self.watch = RunWatch(world.runs, network, boards, world.config.silence_s, random.Random(seed))
        self._limit = asyncio.Semaphore(at_a_time)

    async def run(self) -> None:
        watching = asyncio.ensure_future(self.watch.run())
        try:
            while True:
                view = self.watch.view()
                moment = view.moment
                if moment is not None:
                    lacks = lacking(view.stages, moment, self.world.num_micro_batches, {})
                    await asyncio.gather(*(self._through(moment, m, stages) for m, stages in lacks.items()))
                await asyncio.sleep(0.5)  # what was committed is in the records then
        finally:
            watching.cancel()

    async def _through(self, moment: Moment, m: int, stages: Collection[int]) -> None:
        async with self._limit:
            with suppress(SwarmError):
                inputs, grad = [micro_batch(moment.step + self._skipped(moment), m)], None
                for index in range(self.world.num_stages - 1):
                    inputs.append(await self._forward(index, moment, inputs[-1]))
                for index in reversed(range(min(stages), self.world.num_stages)):
                    grad = await self._backward(index, moment, m, inputs[index], grad, index in stages)

    def _skipped(self, moment: Moment) -> int:
        stages = self.watch.view().stages
        return skipped_batches([peer for peer in stage if peer.moment == moment] for stage in stages)

    async def _backward(
        self, index: int, moment: Moment, m: int, inputs: Tensor, grad: Tensor | None, counts: bool
    ) -> Tensor:
        step = moment.step
        for _ in range(20):
            peer = self._choose(index, moment)
            with suppress(PeerUnavailable):
                result: Tensor = await peer.call(partial(peer.backward, step, m, self.name, inputs, grad), 0.02)
                if not counts or await peer.call(partial(peer.stage_peer.counting.commit, step, m, self.name), 0.0):
                    return result
        raise PeerUnavailable("nobody answers")

    async def _forward(self, index: int, moment: Moment, inputs: Tensor) -> Tensor:
        for _ in range(20):
            peer = self._choose(index, moment)
            with suppress(PeerUnavailable):
                output: Tensor = await peer.call(partial(peer.forward, moment.step, inputs), 0.01)
                return output
        raise PeerUnavailable("nobody answers")

    def _choose(self, index: int, moment: Moment) -> SimulatedStagePeer:
        """Those that look alive, dead or not."""
        peers = [peer for peer in self.watch.view().stages[index] if peer.moment == moment]
        if not peers:
            raise PeerMoved("nobody of the stage is at this moment")
        return self.world.everybody[self.rng.choice(peers).peer_id]
