"""A run in stages in one process: real stages of a small model, real peers and trainers, real gRPC on loopback.

Only the DHT is a dictionary.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.errors import AccessDenied
from swarm_protocol.net.tls import Certificate, ClientCredentials
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.rpc.serving import start_server
from swarm_training.compression.compressor import Plain
from swarm_training.core.config import TrainingConfig
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, Progress
from swarm_training.data.blocks import TokenBlocks
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.service import TrainingService
from swarm_training.optim.local_steps import LocalSteps, outer_optimizer
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.meetings import Environment, GradientCompression
from swarm_training.run.peer import TrainingPeer
from swarm_training.run.standing import now
from swarm_training.run.state import TrainedState
from swarm_training.stages.audit.answers import AnswerLog
from swarm_training.stages.audit.service import AuditService
from swarm_training.stages.engine.accumulator import Accumulator, rounded
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.settings import Scratch
from swarm_training.stages.engine.stage import Stage
from swarm_training.stages.peer.replicas import Replicas
from swarm_training.stages.peer.stage_peer import OwnStage, StagePeer
from swarm_training.stages.peer.watch import RunWatch
from swarm_training.stages.routing.run_stages import stage_run
from swarm_training.stages.rpc.client import WireForms
from swarm_training.stages.rpc.hosting import HostedStage
from swarm_training.stages.rpc.service import StagesService
from swarm_training.stages.trainer import presence
from swarm_training.stages.trainer.config import TrainerConfig
from swarm_training.stages.trainer.micro_batches import Content
from swarm_training.stages.trainer.presence import train_beside
from swarm_training.stages.trainer.recomputing import HeldOutSamples, Recomputing
from swarm_training.stages.trainer.trainer import RunSource, StepReport, Trainer
from tests.worlds.identities import identity
from tests.worlds.runs import Board

RUN, MICRO_BATCHES, VOCABULARY, ROWS, POSITIONS = "whole", 6, 32, 2, 8
MODEL = LlamaConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=False,
)
CONFIG = TrainingConfig(
    counting="exact",
    codec="fp64",
    gossip_s=0.05,
    heartbeat_s=0.2,
    silence_s=2.0,
    checkpoint_every=2,
    checkpoints_kept=8,
)


HELD_OUT = TokenBlocks(np.random.default_rng(3).integers(VOCABULARY, size=5 * POSITIONS, dtype=np.int32), POSITIONS)


class Data:
    count, loss_scale = MICRO_BATCHES, float(ROWS * (POSITIONS - 1))

    def at(self, step: int, number: int) -> Content:
        generator = torch.Generator().manual_seed(7919 * step + number)
        ids = torch.randint(VOCABULARY, (ROWS, POSITIONS), generator=generator)
        return Content(ids, ids)


def stage_of(index: int, num_stages: int, model: LlamaConfig = MODEL) -> tuple[Stage, torch.optim.Optimizer]:
    stage = build_stage(Scratch(copy.deepcopy(model), seed=1), index, num_stages)
    return stage, torch.optim.AdamW(stage.parameters, lr=1e-2)


def one_process(steps: int, max_norm: float = 0.0) -> tuple[list[dict[str, Tensor]], list[float]]:
    """By step, from the first on: all parameters of the whole model by name; and the mean loss of each step."""
    (stage, optimizer), data = stage_of(0, 1), Data()
    state = TrainedState(stage.parameters, optimizer, Plain(), max_norm=max_norm)
    history, losses = [], []
    for step in range(steps + 1):
        history.append({name: each.detach().clone() for name, each in zip(stage.names, stage.parameters, strict=True)})
        total, loss = torch.zeros(stage.num_trained, dtype=torch.float64), 0.0
        for number in range(MICRO_BATCHES):
            content = data.at(step, number)
            found = stage.backward(content.ids, content.labels, loss_scale=data.loss_scale)
            total += rounded(torch.cat([each.reshape(-1) for each in found.parameters]))
            loss += found.loss_sum or 0.0
        assert not max_norm or float((total / MICRO_BATCHES).norm()) > max_norm, "nothing is clipped"
        state.apply(total / MICRO_BATCHES)
        losses.append(loss / (MICRO_BATCHES * data.loss_scale))
    return history, losses


@dataclass
class Roster:
    """One trainer, alone."""

    own_id: str

    def trainers(self) -> Mapping[str, int]:
        return {self.own_id: 0}

    async def enter(self, step: int) -> None: ...

    async def run(self) -> None: ...

    async def leave(self) -> None: ...


@dataclass(eq=False)
class RunningPeer:
    life: StagePeer
    stage: Stage
    service: StagesService
    server: grpc.aio.Server
    network: GrpcNetwork
    thread: ThreadPoolExecutor
    look_s: float  # for mates, before it founds its stage
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tasks += [asyncio.ensure_future(self._live()), asyncio.ensure_future(self.life.watch.run())]

    async def _live(self) -> None:
        await self.life.join(self.look_s)
        await self.life.run()

    @property
    def moment(self) -> Moment | None:
        """None before it has joined."""
        return self.life.moment if self.life.peer.own.state_digest else None


@dataclass
class WholeRun:
    """Attributes:
    local: the micro-batches of a local step; 0: there are none.
    history: by moment, what peers have had, as (name, tensor).
    expelled: peers that have left since others exclude them.
    """

    num_stages: int
    config: TrainingConfig = CONFIG
    model: LlamaConfig = field(default_factory=lambda: MODEL)
    local: int = 0
    records: dict[str, dict[str, pb.SignedProgress]] = field(default_factory=lambda: defaultdict(dict))
    peers: list[RunningPeer] = field(default_factory=list)
    history: dict[Moment, list[tuple[str, Tensor]]] = field(default_factory=lambda: defaultdict(list))
    expelled: list[RunningPeer] = field(default_factory=list)
    _number: int = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, num_stages: int, per_stage: int, **options: Any) -> AsyncIterator[WholeRun]:
        run = cls(num_stages, **options)
        try:
            for index in [index for index in range(num_stages) for _ in range(per_stage)]:
                await run.join(index)
            yield run
        finally:
            for peer in list(run.peers):
                await run.kill(peer)

    async def join(
        self, index: int, computes: Callable[[Stage], Any] = lambda stage: stage, disk: Path | None = None
    ) -> RunningPeer:
        """``computes``: what it computes with for trainers, in place of its stage. ``disk``: for checkpoints."""
        own = identity(self._number)
        self._number += 1
        stage, optimizer = stage_of(index, self.num_stages, self.model)
        local = LocalSteps(optimizer, self.local) if self.local else None
        stepping = optimizer if local is None else outer_optimizer(stage.parameters)
        common, max_norm = self.config.common, self.config.max_norm
        state = TrainedState(stage.parameters, stepping, Plain(), common, max_norm, drifts=local is not None)
        sums = Accumulator(stage, MICRO_BATCHES, torch.float64, 1 << 24)
        network, thread = GrpcNetwork(ClientCredentials(own)), ThreadPoolExecutor(1)

        async def compute(function: Callable[[], Any]) -> Any:
            return await asyncio.get_running_loop().run_in_executor(thread, function)

        runs, rng = [stage_run(RUN, number) for number in range(self.num_stages)], random.Random(self._number)
        boards = [Board(own.peer_id, self.records[run], latency_s=0.0) for run in runs]
        model = state.model_digest
        record = Progress(runs[index], own.peer_id, state=JOINING, target_batch_size=MICRO_BATCHES, model=model)
        peer = TrainingPeer(
            replace(self.config, lasting_directory=disk),
            SwarmAccess(own),
            record,
            Environment(network, boards[index], asyncio.to_thread, rng),
            state,
            GradientCompression(Plain()),
        )
        others = {number: board for number, board in enumerate(boards) if number != index}
        mates = {index: lambda: [*peer.view().all, *peer.table.heard(now(), {JOINING})]}
        watch = RunWatch(runs, network, others, CONFIG.silence_s, rng, mates)
        replicas = Replicas(index, self.num_stages, peer, watch, network, asyncio.to_thread)
        own_stage = OwnStage(index, state, sums, local)
        life = StagePeer(own_stage, peer, watch, replicas, self.config.codec, compute, asyncio.to_thread)
        hosted, answers, certificate = HostedStage(computes(stage), life, sums), AnswerLog(), Certificate.generate()
        config = TrainerConfig(forms=WireForms("fp64", "fp64"))
        recomputing = Recomputing(RUN, hosted, lambda: watch.view().stages, network, config, Data.loss_scale)
        life.evaluation.compute_by(HeldOutSamples(HELD_OUT, ROWS, recomputing.held_out_loss).loss)
        service = StagesService(RUN, hosted, note_answer=answers.note, is_finite=recomputing.is_finite)
        audits = AuditService(RUN, hosted, own, answers)

        def add_services(server: grpc.aio.Server) -> None:
            TrainingService(peer, None).add_to(server)
            service.add_to(server)
            audits.add_to(server)

        server, port = await start_server(add_services, certificate, "127.0.0.1", 0)
        peer.listens_at(f"127.0.0.1:{port}", certificate.fingerprint)
        self._keep_history(state, stage)
        look_s = 0.5 if self.records[runs[index]] else 0.0  # the first one has nobody to find
        found = RunningPeer(life, stage, service, server, network, thread, look_s)
        self.peers.append(found)
        return found

    def _keep_history(self, state: TrainedState, stage: Stage) -> None:
        apply = state.apply

        def applied(gradient: Tensor, squared_norm: float | None) -> None:
            apply(gradient, squared_norm)
            named = zip(stage.names, stage.parameters, strict=True)
            self.history[state.moment] += [(name, each.detach().clone()) for name, each in named]

        state.apply = applied  # type: ignore[method-assign]

    def of_stage(self, index: int) -> list[RunningPeer]:
        return [peer for peer in self.peers if peer.stage.index == index]

    async def kill(self, peer: RunningPeer) -> None:
        """As a process that ends: nobody is told."""
        self.peers.remove(peer)
        tasks = [*peer.tasks, *peer.life.peer._tasks]
        for task in tasks:
            task.cancel()
        peer.service.close()
        await peer.server.stop(None)
        await asyncio.gather(*tasks, return_exceptions=True)
        await peer.network.close()
        peer.thread.shutdown(wait=False, cancel_futures=True)

    async def until(self, is_so: Callable[[], object]) -> None:
        while not is_so():
            for peer in list(self.peers):
                for task in peer.tasks:
                    if task.done() and isinstance(task.exception(), AccessDenied):
                        self.expelled.append(peer)
                        await self.kill(peer)
                        break
                    if task.done():
                        task.result()
            await asyncio.sleep(0.02)

    async def train(
        self, end: int | None, reports: list[StepReport], number: int = 90, audit_share: float = 0.0
    ) -> int | None:
        own = identity(number)
        network = GrpcNetwork(ClientCredentials(own))
        runs = [stage_run(RUN, index) for index in range(self.num_stages)]
        boards = {index: Board(own.peer_id, self.records[run], latency_s=0.0) for index, run in enumerate(runs)}
        watch = RunWatch(runs, network, boards, CONFIG.silence_s, random.Random(number))
        watching = asyncio.ensure_future(watch.run())
        config = TrainerConfig(forms=WireForms("fp64", "fp64"), settle_s=1.0, audit_share=audit_share)
        roster = Roster(own.peer_id)
        run_source = RunSource(RUN, lambda: watch.view().stages, roster.trainers)
        trainer = Trainer(own.peer_id, run_source, network, Data(), config, reports.append)
        try:
            with patch.object(presence, "_NEWS_S", 0.1):  # records of this board are never old
                return await train_beside(watch, roster, trainer, MICRO_BATCHES, end, join_timeout_s=60.0)
        finally:
            await end_tasks([watching])
            await network.close()

    async def churn(self, rng: random.Random, most: int) -> None:
        """Kills a peer of a stage that has another, and has one join there, again and again.

        Nobody dies who alone has what a stage would go back to: then the run could not go on, and would say so.
        """
        for _ in range(most):
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            while not (victims := self._victims()):
                await asyncio.sleep(0.02)
            victim = rng.choice(victims)
            await self.kill(victim)
            await self.join(victim.stage.index)

    def _victims(self) -> list[RunningPeer]:
        joined = [peer for peer in self.peers if peer.moment is not None]
        sizes = Counter(peer.stage.index for peer in joined)
        return [peer for peer in joined if sizes[peer.stage.index] > 1 and self._is_redundant(peer, joined)]

    def _is_redundant(self, victim: RunningPeer, joined: list[RunningPeer]) -> bool:
        """Whether others keep the newest checkpoint of each stage, there and at the next one."""
        for index in range(self.num_stages):
            mates = [peer for peer in joined if peer.stage.index == index]
            newest = max(max(peer.life.peer.rollbacks.kept.digests(), default=-1) for peer in mates)
            after = [peer for peer in joined if peer.stage.index == (index + 1) % self.num_stages]
            kept = [peer.life.peer.rollbacks.kept.digests() for peer in mates if peer is not victim]
            replicas = [peer.life.peer.checkpoints.replicas.digests() for peer in after if peer is not victim]
            if not all(any(newest in digests for digests in each) for each in (kept, replicas)):
                return False
        return True
