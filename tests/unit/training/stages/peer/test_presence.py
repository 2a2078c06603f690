"""Stage peers and one who watches, over real gRPC and a real DHT on loopback."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.errors import AccessDenied, PeerUnavailable
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.compressor import Plain
from swarm_training.compression.error_feedback import ErrorFeedback
from swarm_training.contract.backend import Joining
from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, PRESENT
from swarm_training.core_backend import send_order
from swarm_training.ledger.orders import Ban, ModeratorOrder
from swarm_training.net.channels import GrpcNetwork
from swarm_training.net.membership import RunMembership
from swarm_training.progress import gossip
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.run.standing import now
from swarm_training.run.state import TrainedState
from swarm_training.stages.peer import presence, resuming, watch
from swarm_training.stages.peer.presence import StageOfRun, StagePresence, WatchPresence
from swarm_training.stages.peer.stage_peer import OwnStage
from tests.marks import SLOW
from tests.unit.support import until
from tests.worlds.identities import identity
from tests.worlds.stages import CONFIG, ToyStage, ToySums, micro_batch, optimizer_of

STAGES, MICRO_BATCHES = 2, 4
MODERATOR = 7
LOOK_S = 0.3  # for mates: each peer enters when those before it have


@pytest.fixture(autouse=True)
def boards_are_read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossip, "_READ_S", 0.5)
    monkeypatch.setattr(watch, "_READ_S", 0.5)
    monkeypatch.setattr(presence, "_ORDERS_S", 0.5)


async def enter(
    index: int,
    number: int,
    initial_peers: list[str],
    organiser: OrganiserKey | None = None,
    disk: Path | None = None,
    board: DhtPeerRegistry | None = None,
    encoder: ErrorFeedback | None = None,
    num_micro_batches: int = MICRO_BATCHES,
) -> tuple[StagePresence, ToyStage]:
    stage = ToyStage(index, STAGES)
    config = replace(CONFIG, host="127.0.0.1", lasting_directory=disk, checkpoint_every=1, checkpoints_kept=11)
    state = TrainedState(stage.parameters, optimizer_of(stage), Plain(), config.common)
    where, member = StageOfRun("toy", index, STAGES, num_micro_batches), member_of(number, initial_peers, organiser)
    own = OwnStage(index, state, ToySums(stage))
    entered = await StagePresence.enter(where, member, config, own, board=board, look_s=LOOK_S, encoder=encoder)
    return entered, stage


def member_of(number: int, initial_peers: list[str], organiser: OrganiserKey | None) -> RunMembership:
    if organiser is None:
        return RunMembership(identity(number), initial_peers=initial_peers)
    own = identity(number)
    role = Role.MODERATOR if number == MODERATOR else Role.TRAINER
    grant = Grant.new(organiser.public, role, f"member {number}", own.peer_id, time.time() - 10, time.time() + 1000)
    return RunMembership(own, grant.signed(organiser), AccessControl(organiser.public), initial_peers=initial_peers)


async def compute_step(first: StagePresence, last: StagePresence, stages: tuple[ToyStage, ToyStage]) -> None:
    """All micro-batches of step 0, at both stages."""
    for m in range(MICRO_BATCHES):
        found = stages[1].backward(stages[0].forward(micro_batch(0, m)), None)
        for peer, gradients in ((last, found), (first, stages[0].backward(micro_batch(0, m), found.inputs))):
            peer.stage_peer.counting.add(0, m, "trainer", gradients)
            assert await peer.stage_peer.counting.commit(0, m, "trainer")


async def test_a_stage_averages_with_the_encoder_that_it_is_given() -> None:
    encoder = ErrorFeedback(codec_of("2bit"))
    entered, _ = await enter(0, 0, [], encoder=encoder)
    assert entered.stage_peer.peer._averager._coding.encoder is encoder
    await entered.leave()


async def test_a_peer_that_cannot_join_ends_its_tasks_and_says_that_it_has_left() -> None:
    first, _ = await enter(0, 0, [])
    before = {task.get_name() for task in asyncio.all_tasks()}
    with pytest.raises(ValueError, match="expected the same"):
        await enter(0, 1, first.addresses, num_micro_batches=2 * MICRO_BATCHES)
    assert not first.stage_peer.peer.table.heard(now(), {JOINING})
    running = [task for task in asyncio.all_tasks() if task.get_name() not in before]
    assert not [task for task in running if "Gossip" in repr(task.get_coro())]
    await first.leave()


async def test_a_peer_that_is_cancelled_after_its_join_ends_its_tasks_and_says_that_it_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = await enter(0, 0, [])
    before = {task.get_name() for task in asyncio.all_tasks()}
    is_asked = asyncio.Event()

    async def addresses(_: DhtPeerRegistry) -> list[str]:
        is_asked.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(DhtPeerRegistry, "addresses", addresses)
    entering = asyncio.ensure_future(enter(0, 1, first.addresses))
    await asyncio.wait([entering, asyncio.ensure_future(is_asked.wait())], return_when=asyncio.FIRST_COMPLETED)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not first.stage_peer.peer.table.heard(now(), {JOINING, *PRESENT})
    running = [task for task in asyncio.all_tasks() if task.get_name() not in before]
    assert not [task for task in running if "Gossip" in repr(task.get_coro())]
    await first.leave()


async def test_a_peer_that_fails_to_leave_closes_its_server_and_its_node() -> None:
    class Failing:
        async def leave(self) -> None:
            raise PeerUnavailable("the disk fails")

    closed: list[str] = []
    resources = AsyncExitStack()
    resources.callback(closed.append, "node")
    stage_peer: Any = SimpleNamespace(peer=Failing())
    network: Any = None
    with pytest.raises(PeerUnavailable, match="the disk fails"):
        await StagePresence(stage_peer, [], network, [], resources).leave()
    assert closed == ["node"]


async def test_a_moderator_bans_by_the_name_of_the_run() -> None:
    organiser = OrganiserKey.generate()
    async with AsyncExitStack() as leaving:
        first, _ = await enter(0, 0, [], organiser)
        leaving.push_async_callback(first.leave)
        banned, _ = await enter(1, 1, first.addresses, organiser)
        leaving.push_async_callback(banned.leave)
        mate, _ = await enter(1, 2, first.addresses, organiser)
        leaving.push_async_callback(mate.leave)
        watcher = member_of(3, first.addresses, organiser)
        watching = await WatchPresence.enter("toy", STAGES, watcher, CONFIG)
        leaving.push_async_callback(watching.leave)
        watches = [watching.watch, first.stage_peer.watch, mate.stage_peer.watch]
        await until(lambda: all([len(stage) for stage in each.view().stages] == [1, 2] for each in watches))
        moderator = member_of(MODERATOR, first.addresses, organiser)
        order = ModeratorOrder.new("toy", Ban(identity(1).peer_id, "sends noise"), time.time(), 1000.0)
        signed = order.signed(moderator.identity, moderator.token)
        who = Joining("toy", MICRO_BATCHES, tuple(first.addresses), moderator.identity, organiser.public)
        await asyncio.to_thread(send_order, who, signed)
        await until(lambda: all([len(stage) for stage in each.view().stages] == [1, 1] for each in watches))
        assert watching.watch.view().stages[1][0].peer_id == identity(2).peer_id
        with pytest.raises(AccessDenied, match="sends noise"):
            await asyncio.wait_for(banned.wait(), 60.0)


@SLOW
async def test_a_private_run_that_has_ended_starts_again_over_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its founder is found by the second stage while it waits for that."""
    monkeypatch.setattr(resuming, "SETTLE_S", 0.5)
    organiser, disks = OrganiserKey.generate(), [tmp_path / str(index) for index in range(STAGES)]
    async with asyncio.timeout(120.0):
        first, first_stage = await enter(0, 0, [], organiser, disks[0])
        second, second_stage = await enter(1, 1, first.addresses, organiser, disks[1])
        await compute_step(first, second, (first_stage, second_stage))
        # Their records say it once the checkpoint of step 1 is written; the weights are that far before.
        await until(lambda: all(each.stage_peer.peer.own.moment == Moment(0, 1) for each in (first, second)))
        for each in (second, first):
            await each.leave()
        shutil.rmtree(disks[0] / "stage-0" / "before", ignore_errors=True)  # a copy of the second stage's
        founder, config = member_of(0, [], organiser), replace(CONFIG, host="127.0.0.1")
        board = await founder.join("toy", config, await founder.find_host(config))
        founding = asyncio.ensure_future(enter(0, 0, [], organiser, disks[0], board))
        await until(lambda: "nobody has a checkpoint of stage 1 so far" in caplog.text)
        assert not founding.done()  # the second stage has its checkpoint alone
        second, _ = await enter(1, 1, await board.addresses(), organiser, disks[1])
        first, _ = await founding
        assert first.stage_peer.moment == second.stage_peer.moment == Moment(1, 1)
        for each in (second, first):
            await each.leave()
        await board.close()


async def test_a_failed_entry_closes_what_was_opened_and_no_given_board(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def closing(name: str) -> Any:
        return lambda *_: asyncio.sleep(0.0, closed.append(name))

    member, board = RunMembership(identity(0), initial_peers=["somewhere"]), SimpleNamespace(close=closing("board"))
    monkeypatch.setattr(RunMembership, "join", lambda *_: asyncio.sleep(0.0, board))
    monkeypatch.setattr(GrpcNetwork, "close", closing("network"))
    with pytest.raises(AttributeError, match="beside"):
        await WatchPresence.enter("toy", STAGES, member, CONFIG)
    assert closed == ["network", "board"]
    async with AsyncExitStack() as resources:
        await member.connect("toy", CONFIG, resources, board=board)  # type: ignore[arg-type]
    assert closed == ["network", "board", "network"]
