"""A run in stages whose processes have all ended starts again from their disks: every tensor is that of one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from swarm_training.core.moment import Moment
from swarm_training.rollback.kept import stored_in
from swarm_training.stages.peer import resuming
from swarm_training.stages.trainer.trainer import StepReport
from tests.marks import SLOW
from tests.worlds.whole_runs import WholeRun, one_process

LIMIT_S = 300.0


@asynccontextmanager
async def started(disks: list[tuple[int, Path]], patience_s: float) -> AsyncIterator[WholeRun]:
    """A run whose peers have just been started, each at a stage, with a disk. Nobody knows of an earlier life."""
    with patch.object(resuming, "SETTLE_S", 0.5), patch.object(resuming, "PATIENCE_S", patience_s):
        async with asyncio.timeout(LIMIT_S), WholeRun.running(1 + max(index for index, _ in disks), 0) as run:
            for index, disk in disks:
                await run.join(index, disk=disk)
            await run.until(lambda: all(peer.moment is not None for peer in run.peers))
            yield run


def require_one_process(run: WholeRun, first: int, last: int) -> None:
    """Require that the run took these steps, and had all tensors of one process after each."""
    truth, _ = one_process(last)
    for step in range(first, last + 1):
        found = [each for moment, tensors in run.history.items() if moment.step == step for each in tensors]
        assert {name for name, _ in found} == truth[0].keys()
        assert all(torch.equal(tensor, truth[step][name]) for name, tensor in found), step


def train(disks: list[tuple[int, Path]], end: int, first: int, patience_s: float = LIMIT_S) -> set[Moment]:
    """Start the peers, train from the first of these steps to the last, and kill them all. Return where they began.
    ``patience_s``: the time to wait for newer checkpoints that some stage has."""

    async def scenario() -> set[Moment]:
        async with started(disks, patience_s) as run:
            began = {peer.moment for peer in run.peers if peer.moment is not None}
            reports: list[StepReport] = []
            training = asyncio.ensure_future(run.train(end, reports))
            await run.until(training.done)
            training.result()
            require_one_process(run, first, end)
            return began

    return asyncio.run(scenario())


@SLOW
def test_a_run_stops_whole_and_starts_whole(tmp_path: Path) -> None:
    """Checkpoints are of every second step: the third one is taken again, and the data go on with it."""
    disks = [(index, tmp_path / str(index)) for index in range(2)]
    assert train(disks, end=3, first=1) == {Moment(0, 0)}
    assert train(disks, end=4, first=3) == {Moment(1, 2)}


@SLOW
@pytest.mark.parametrize("harm", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_all_stages_go_back_to_what_one_of_them_has(harm: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """Each stage has two peers. Both have lost the newest checkpoint of one, and its copies are gone."""
    disks = [(number // 2, tmp_path / str(number)) for number in range(4)]
    train(disks, end=5, first=1)
    for _, disk in disks:
        for path, kept in (stored_in(disk / "stage-0") | stored_in(disk / "stage-1" / "before")).items():
            if kept.step == 4:
                path.write_bytes(harm(path.read_bytes()))
    assert train(disks, end=6, first=3, patience_s=4.0) == {Moment(1, 2)}
