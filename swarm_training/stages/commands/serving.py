"""The serving of a stage until the process is stopped: one given stage, or always the stage that needs a peer most.

After the run's last step, the process may go on as an inference server of the trained blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import grpc

from swarm_protocol.process.routine import end_tasks, repeat
from swarm_server.machine.heap import HeapTrimmer
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.contract.backend import Joining
from swarm_training.core.callbacks import Say
from swarm_training.core.config import TrainingConfig
from swarm_training.data.blocks import TokenBlocks
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.membership import RunMembership
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.reports.stepping import StepReports
from swarm_training.rollback.stored import StoredCheckpoints
from swarm_training.run.state import digest_of
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.audit.answers import AnswerLog
from swarm_training.stages.audit.service import AuditService
from swarm_training.stages.commands.building import (
    BuiltStage,
    build,
    held_out_samples,
    loss_scale,
    require_same_count,
    require_stages,
    require_untied,
    stage_source,
    trainer_config,
    training_config,
)
from swarm_training.stages.commands.inference import (
    Afterwards,
    InferenceContext,
    require_untaken,
    serve_trained,
    until_last_step,
)
from swarm_training.stages.commands.looking import CurveFiles, follow_stage
from swarm_training.stages.engine.settings import StageSource
from swarm_training.stages.engine.stage import Stage
from swarm_training.stages.peer.placing import Announcements, PlacementTimes, StageChooser, choose
from swarm_training.stages.peer.presence import StageOfRun, StagePresence, WatchPresence
from swarm_training.stages.peer.shared import spans_of
from swarm_training.stages.peer.stage_peer import LOOK_S, OwnStage, StagePeer
from swarm_training.stages.placement.spans import costs_of, spans_of_stages
from swarm_training.stages.rpc.hosting import HostedStage
from swarm_training.stages.rpc.service import StagesService
from swarm_training.stages.trainer.recomputing import HeldOutSamples, Recomputing

_TRIM_S = 20.0  # between two checks for heap growth: giving memory back stops computing for 0.3 s


async def serve(
    file: RunFile,
    who: Joining,
    index: int | None,
    say: Say,
    device: str = "cpu",
    *,
    stays: bool = True,
    pace: PlacementTimes | None = None,
    afterwards: Afterwards | None = None,
    memory_bytes: int | None = None,
    reports: StepReports | None = None,
) -> None:
    """Hold a stage until cancelled, and then leave the run.

    ``index``: the stage where the peer begins; None: the stage that limits the run. ``stays``: the peer stays at a
    given stage; else it moves to another when that helps. ``afterwards``: the plan after the last step, when the
    process serves the trained blocks; the peer stays in the run then, for peers that come late. ``memory_bytes``: the
    memory that the process may take, see ``room_of``. ``reports``: where the numbers of each step go; None: nowhere.

    Raises:
        ValueError: there is no such stage, model or address, or no room for the stage; or the other peers train another
            model; or the directory for the trained model has another one.
        NoSwarm: no initial peer answered.
        AccessDenied: a moderator has banned this peer.
        SwarmError: see ``serve_trained``; UnreadableState, which is one: see ``StagePeer.run``.
    """
    place = StageOfRun(file.run.name, index or 0, file.stages.count, require_stages(file))
    require_same_count(file)
    config, member = training_config(file, who.address), who.membership()
    source = await asyncio.to_thread(stage_source, file)
    require_untied(file, source)
    may_be_last = index in (None, file.stages.count - 1) or not stays
    held_out = await asyncio.to_thread(held_out_samples, file) if may_be_last else None
    board = await member.join(place.run, config, await member.find_host(config))
    try:
        serving = _Serving(
            file,
            source,
            member,
            config,
            board,
            place,
            device,
            pace or PlacementTimes(step_s=inf if file.local.batch_size else PlacementTimes.step_s),
            say,
            afterwards,
            memory_bytes,
            held_out,
            reports,
        )
        if index is not None and stays:
            await serving.hold(index, stays=True)
        else:
            await serving.go_where_it_helps(index)
    finally:
        await board.close()


@dataclass
class _Serving:
    """A peer on one DHT node, which holds one stage after another."""

    file: RunFile
    source: StageSource
    member: RunMembership
    config: TrainingConfig
    board: DhtPeerRegistry
    place: StageOfRun
    device: str
    pace: PlacementTimes
    say: Say
    afterwards: Afterwards | None
    memory_bytes: int | None
    held_out: TokenBlocks | None
    reports: StepReports | None

    def __post_init__(self) -> None:
        runs = self.place.runs
        self.boards = {number: self.board.beside(run) for number, run in enumerate(runs)}
        self.costs = costs_of(self.source.config, spans_of_stages(self.source.config, len(runs)))
        self.announcements = Announcements(self.boards, runs, self.member.identity)
        self.is_founder = not self.member.initial_peers  # until the peer moves: the next stage may have peers
        self.is_new = True  # until the peer has held a stage

    async def go_where_it_helps(self, index: int | None) -> None:
        """Hold one stage after another, each the one that limits the run, until cancelled."""
        if index is None:
            index = 0 if self.is_founder else await self._choose()
        while True:
            moved_to = await self.hold(index, stays=False)
            self.say(f"moves from stage {index} to stage {moved_to}, which limits the run")
            index, self.is_founder = moved_to, False

    async def _choose(self) -> int:
        run, count = self.file.run.name, self.place.num_stages
        watching = await WatchPresence.enter(run, count, self.member, self.config, self.board)
        try:
            own_id = self.member.identity.peer_id
            return await choose(watching.watch, self.announcements, own_id, self.costs, self.pace)
        finally:
            await watching.leave()

    async def hold(self, index: int, *, stays: bool) -> int:
        """Hold a stage, and return the next stage once the peer has left this one. A peer that stays never returns."""
        place, config = replace(self.place, index=index), self.config
        async with self.announcements.on_the_way(index):
            built = await asyncio.to_thread(
                build, self.file, self.source, index, config, self.device, self.memory_bytes
            )
        stage, services = built.stage, list[StagesService]()
        self.say(f"stage {index} of {place.num_stages}: blocks {stage.span}, {stage.num_trained} parameters")
        self.say(f"memory {built.memory}")
        if waits := self.is_new and await asyncio.to_thread(self._has_checkpoints):
            await self._say_address()  # before the peer has joined: it may wait for others, who need the address
            self.say("the run goes on from checkpoints on the disks of its peers, once each stage has one")
        presence = await StagePresence.enter(
            place,
            self.member,
            config,
            OwnStage(index, built.state, built.sums, built.local),
            partial(self._add_services, built, services),
            shared=spans_of(stage.names, stage.parameters, stage.shared),
            board=self.board,
            look_s=0.0 if self.is_founder else LOOK_S,
            encoder=ErrorFeedback(codec_of(config.codec)) if self.file.averaging.error_feedback else None,
        )
        files = CurveFiles(config.lasting_directory, self.file, self.say)
        telling = asyncio.ensure_future(follow_stage(presence.stage_peer, self.file, self.reports, files, self.say))
        trimming: asyncio.Task[None] = asyncio.ensure_future(repeat(HeapTrimmer().trim, (_TRIM_S, _TRIM_S)))
        moved_to: int | None = None
        try:
            if self.is_new and self.afterwards is not None:
                require_untaken(self.afterwards, presence.stage_peer.step)
            self.is_new = False
            if not waits:
                await self._say_address()
            moved_to = await self._until_it_moves(presence, stage, stays)
            return moved_to
        finally:
            await end_tasks([telling, trimming])
            for service in services:
                service.close()
            await presence.leave()
            if moved_to is None:
                self.say(f"left the run after step {presence.stage_peer.step}")

    async def _say_address(self) -> None:
        self.say(f"others join by: --initial-peers {' '.join(await self.board.addresses())}")

    def _has_checkpoints(self) -> bool:
        """Return whether this machine has checkpoints. If so, the peer may have to wait for peers of other stages."""
        stored = StoredCheckpoints(self.config.lasting_directory, digest_of)
        return any(not offered.kept.is_beginning for offered in stored.files(self.place.num_stages).values())

    def _add_services(
        self,
        built: BuiltStage,
        services: list[StagesService],
        server: grpc.aio.Server,
        peer: StagePeer,
        network: GrpcNetwork,
    ) -> None:
        """Add the services for trainers and their audits. ``services``: takes those that must be closed."""
        file, run, access = self.file, self.place.run, self.member.control
        hosted, answers = HostedStage(built.stage, peer, built.sums), AnswerLog() if file.stages.audit_share else None
        config, scale = trainer_config(file), loss_scale(file)
        recomputing = Recomputing(run, hosted, lambda: peer.watch.view().stages, network, config, scale)
        if built.stage.is_last and self.held_out is not None:
            rows = file.stages.micro_batch_size
            peer.evaluation.compute_by(HeldOutSamples(self.held_out, rows, recomputing.held_out_loss).loss)
        note, banned = None if answers is None else answers.note, peer.peer.banned
        services.append(StagesService(run, hosted, built.limits, access, note, banned, recomputing.is_finite))
        services[-1].add_to(server)
        if answers is not None:
            own, precision = self.member.identity, file.stages.precision
            AuditService(run, hosted, own, answers, built.limits, access, precision).add_to(server)

    async def _until_it_moves(self, presence: StagePresence, stage: Stage, stays: bool) -> int:
        """Return the stage to which the peer moves. The peer does not move any more after the last step."""
        peer, after = presence.stage_peer, self.afterwards
        ways: list[Coroutine[Any, Any, int | None]] = [presence.wait()]
        if not stays:
            ways.append(StageChooser(peer, self.costs, self.pace).next_stage())
        if after is not None:
            ways.append(until_last_step(peer.watch, after.step))
        moved_to = await _first_of(ways)
        if moved_to is not None:
            return moved_to
        assert after is not None, "a peer that stays is there until it is cancelled"
        moment = peer.watch.view().moment
        if moment is not None:
            after = replace(after, step=min(after.step, moment.step))  # the run may have ended before the planned step
        host = self.config.host, self.config.announce_host
        here = InferenceContext(stage, peer.watch, presence.network, presence.addresses, *host)
        await _first_of([presence.wait(), serve_trained(self.file, after, here, self.say)])
        raise AssertionError("a server serves until it is cancelled")


async def _first_of(ways: list[Coroutine[Any, Any, int | None]]) -> int | None:
    """Return the result of the coroutine that ends first, or raise its error; cancel the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        await end_tasks(tasks)
