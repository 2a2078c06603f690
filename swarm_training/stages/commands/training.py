"""The training command of a trainer, which owns nothing but data."""

from __future__ import annotations

import asyncio
from functools import partial

from swarm_training.contract.backend import Joining
from swarm_training.core.callbacks import Say
from swarm_training.reports.stepping import StepReports
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import build_micro_batches, require_stages, trainer_config
from swarm_training.stages.commands.looking import follow_as_trainer
from swarm_training.stages.trainer.presence import train
from swarm_training.stages.trainer.trainer import StepReport


async def train_run(file: RunFile, who: Joining, end: int | None, say: Say, reports: StepReports | None = None) -> None:
    """Train until the run has taken ``end`` steps, or all of its schedule, or until cancelled. ``reports``: where the
    numbers of each step go; None: nowhere.

    Raises ValueError if there is no such data, and as ``swarm_training.stages.trainer.presence.train``.
    """
    require_stages(file)
    data = await asyncio.to_thread(build_micro_batches, file)
    steps = end or file.optimizer.total_steps or None
    config = trainer_config(file)
    has_told = False

    def tell(report: StepReport) -> None:
        nonlocal has_told
        if report.loss is None:  # other trainers have computed all of the step
            return
        has_told = True
        again = f", {report.num_replays} replayed" if report.num_replays else ""
        say(
            f"step {report.moment.step + 1}: loss {report.loss:.3f}, {report.num_micro_batches} of {data.count} "
            f"micro-batches{again} in {report.seconds:.1f} s"
        )

    beside = None if reports is None else partial(follow_as_trainer, file=file, reports=reports, say=say)
    ended = await train(file.run.name, file.stages.count, who.membership(), data, config, tell, steps, beside=beside)
    if ended is not None:
        say(f"the run has ended at step {ended}, since the loss on held-out data falls no more")
    elif not has_told:
        say(f"nothing was left to do: the run has taken {steps} steps")
