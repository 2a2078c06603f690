"""The export of a run in stages: a checkpoint that stock transformers loads, or an adapter for PEFT."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarm_training.checkpoints.whole_directory import require_writable
from swarm_training.contract.backend import Joining
from swarm_training.core.callbacks import Say
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.building import require_stages, stage_source, training_config
from swarm_training.stages.commands.collecting import collect, require_new
from swarm_training.stages.compress.layers import NONE
from swarm_training.stages.engine.boundaries import FILE_NAME
from swarm_training.stages.peer.presence import WatchPresence


async def export_run(
    file: RunFile,
    who: Joining,
    directory: Path,
    say: Say,
    *,
    averaged: bool = False,
    best: bool = False,
    timeout_s: float = 60.0,
) -> None:
    """Write the run as it is now if it stands still, else its newest checkpoint that all stages have.

    ``averaged``: write the moving average of the weights instead of the weights. ``best``: write the checkpoint with
    the lowest loss on held-out data instead.

    Raises:
        NoSwarm, PeerUnavailable: no peer gives some stage.
        CannotWrite: the directory cannot be written.
        ValueError: the directory is not empty, or the peers train another model.
    """
    require_stages(file)
    if averaged and not file.optimizer.average_decay:
        raise ValueError("the run has no average of its weights: expected average_decay under [optimizer]")
    if best and not file.evaluation.every:
        raise ValueError("the run is not evaluated on held-out data: expected [evaluation] in its file")
    require_new(directory)
    require_writable(directory)
    config = training_config(file)
    source = await asyncio.to_thread(stage_source, file)
    watching = await WatchPresence.enter(file.run.name, file.stages.count, who.membership(), config)
    try:
        await watching.watch.until_complete(timeout_s)
        watch, network = watching.watch, watching.network
        step = await collect(file, source, watch.all_records, network, directory, averaged=averaged, best=best)
    finally:
        await watching.leave()
    what = "the average of the weights" if averaged else "the run"
    say(f"wrote {directory}: {what} after step {step}")
    if (layers := file.stages.layers) != NONE:
        say(
            f"the model was trained with layers between its stages ({layers}), which no stock model has: without those "
            f"in {FILE_NAME} it computes something else. "
            "swarm_training.stages.engine.boundaries.install_boundaries puts them into the loaded model"
        )
