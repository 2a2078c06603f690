"""What travels in fewer bits, beside one process: the losses of steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm_training.net.membership import RunMembership
from swarm_training.runfile.reading import read_run_file
from swarm_training.stages.commands.building import build_micro_batches, trainer_config
from swarm_training.stages.trainer.presence import train
from swarm_training.stages.trainer.trainer import StepReport
from tests.quick_keys import new_identity
from tests.swarm.stages.crew import Crew, crew
from tests.swarm.stages.model import one_process, write_run

pytestmark = pytest.mark.slow
LIMIT_S = 500.0


def train_here(peers: Crew, steps: int) -> list[float]:
    """The loss of each step; the trainer is this process."""
    file = read_run_file(peers.run_file)
    data = build_micro_batches(file)
    reports: list[StepReport] = []

    async def scenario() -> None:
        member = RunMembership(new_identity(), initial_peers=peers.addresses)
        async with asyncio.timeout(LIMIT_S):
            config = trainer_config(file)
            await train(file.run.name, file.stages.count, member, data, config, reports.append, steps)

    asyncio.run(scenario())
    assert [report.moment.step for report in reports] == list(range(steps))
    assert all(report.num_micro_batches == data.count for report in reports)
    return [report.loss for report in reports]


@pytest.mark.parametrize(("steps", "most"), [(14, 0.005), pytest.param(60, 0.01, marks=pytest.mark.long)])
def test_int8_has_nearly_the_losses_of_one_process(tmp_path: Path, steps: int, most: float) -> None:
    with crew(write_run(tmp_path, 4, "int8"), tmp_path) as peers:
        peers.join(0)
        peers.join(1, 2, 3)
        found = train_here(peers, steps)
    expected = one_process(peers.run_file, steps)[1]
    assert found != expected
    assert sum(found[-5:]) == pytest.approx(sum(expected[-5:]), rel=most)
    assert expected[-1] < 0.5 * expected[0]
