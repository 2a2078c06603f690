"""Stages whose peers have all ended, and which start again from their disks, in virtual time beside one process."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm_training.core.moment import Moment
from swarm_training.rollback.kept import stored_in
from tests.marks import IN_VIRTUAL_TIME, SLOW
from tests.worlds.runs import simulate
from tests.worlds.stages import CONFIG, StageWorld, ToyTrainer, single

pytestmark = IN_VIRTUAL_TIME

STAGES, MICRO_BATCHES = 2, 3
Disks = list[tuple[int, Path]]  # by peer, its stage and its disk


def live(disks: Disks, until: int | None, limit_s: float = 300.0, keep: int = 8) -> dict[int, Moment]:
    """Start peers, train to a step, and kill them at once. Return by stage where it began; a stage that waits is not in
    it. ``until``: None to live for ``limit_s`` without a trainer."""

    async def scenario() -> dict[int, Moment]:
        world = StageWorld(STAGES, MICRO_BATCHES, replace(CONFIG, checkpoints_kept=keep))
        peers = [world.join(index, disk) for index, disk in disks]
        began: dict[int, Moment] = {}
        training = asyncio.ensure_future(ToyTrainer(world).run() if until is not None else asyncio.sleep(limit_s))
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while until is None or any(peer.state.step < until for peer in peers):
                    for peer in peers:
                        if peer.peer.own.state_digest and peer.history:
                            began.setdefault(peer.stage_peer.index, next(iter(peer.history)))
                    for task in [task for peer in peers for task in peer.tasks[:2] if task.done()]:  # its life
                        raise AssertionError(task.result())
                    await asyncio.sleep(0.005)
        training.cancel()
        await asyncio.sleep(1.0)  # the next stage copies the last checkpoint
        for peer in peers:
            world.kill(peer.peer_id)
        truth = single(STAGES, MICRO_BATCHES, until or 0)
        for peer in peers:
            for moment, parameters in peer.history.items():
                for own, expected in zip(parameters, truth[moment.step][peer.stage_peer.index], strict=True):
                    assert torch.equal(own, expected), moment
            assert until is None or max(moment.step for moment in peer.history) == until
        return began

    return simulate(scenario, limit_s=10 * limit_s)


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    both = [(index, directory / str(index)) for index in range(STAGES)]
    assert live(both, until=5) == {0: Moment(0, 0), 1: Moment(0, 0)}
    return directory


@pytest.fixture
def disks(five_steps: Path, tmp_path: Path) -> Disks:
    """A disk for each stage, of a run that has taken five steps."""
    shutil.copytree(five_steps, tmp_path, dirs_exist_ok=True)
    return [(index, tmp_path / str(index)) for index in range(STAGES)]


def checkpoint(disk: Path, stage: int, step: int, copies: bool = False) -> Path:
    directory = disk / f"stage-{stage + 1 if copies else stage}" / ("before" if copies else "")
    return next(path for path, kept in stored_in(directory).items() if kept.step == step)


def test_a_run_goes_on_from_the_newest_checkpoint_as_if_it_had_not_stopped(disks: Disks) -> None:
    assert live(disks, until=7) == {0: Moment(1, 4), 1: Moment(1, 4)}
    assert live(disks, until=8) == {0: Moment(2, 6), 1: Moment(2, 6)}


def test_peers_of_all_stages_that_begin_a_run_may_share_a_disk(tmp_path: Path) -> None:
    """Whoever comes later finds the checkpoint there with which another stage has just begun."""
    disks = [(0, tmp_path), (1, tmp_path)]
    live(disks[:1], until=None, limit_s=20.0)  # it is killed before anybody joins
    assert [kept.step for kept in stored_in(tmp_path / "stage-0").values()] == [0]
    assert live(disks, until=3) == {0: Moment(0, 0), 1: Moment(0, 0)}


def tamper(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of a parameter
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [tamper, pytest.param(Path.unlink, marks=SLOW)])
def test_the_next_older_one_takes_the_place_of_a_damaged_one(
    disks: Disks, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The other stage has the newest one, and goes back with it, and says so."""
    shutil.rmtree(disks[1][1] / "stage-1" / "before")  # a copy of the damaged one
    harm(checkpoint(disks[0][1], 0, 4))
    with caplog.at_level(logging.WARNING):
        assert live(disks, until=7) == {0: Moment(1, 2), 1: Moment(1, 2)}
    assert "from step 2, the newest of which each stage has a checkpoint, unless those of step 4 come" in caplog.text
    assert "the run is at step 2, and goes on without the newer checkpoint of step 4 here" in caplog.messages
    assert sum("is damaged: an older one takes its place" in text for text in caplog.messages) == (harm != Path.unlink)
    assert {kept.step for kept in stored_in(disks[1][1] / "stage-1").values()} == {0, 2, 4, 6}


def test_a_stage_that_comes_later_is_awaited(disks: Disks, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Starting over would be another run."""
    shutil.rmtree(disks[0][1] / "stage-0" / "before")  # of stage 1
    new = tmp_path / "new"
    with caplog.at_level(logging.WARNING):
        assert live([disks[0], (1, new)], until=None, limit_s=30.0) == {}
    assert "nobody has a checkpoint of stage 1 so far. To start over, remove " in caplog.text
    assert live(disks, until=6) == {0: Moment(1, 4), 1: Moment(1, 4)}
