"""A process that takes part in a run by Hugging Face's Trainer: ``volunteer``'s counterpart."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import PrinterCallback, Trainer

from swarm_training import TrainingRun
from swarm_training.trainer.callback import TrainingRunCallback
from tests.training.volunteer import digest, meet_until_told_to_go, say
from tests.unit.training.trainer.test_callback import Model, adamw, arguments, losses, rows

STEPS = 40
TARGET = 16


def main(number: int, peers: list[str]) -> None:
    torch.set_num_threads(1)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * number  # the founder's weights count
    optimizer = adamw(model)
    run = TrainingRun("trainer", model.parameters(), optimizer, target_batch_size=TARGET, initial_peers=peers)
    with run, tempfile.TemporaryDirectory() as directory:
        callback = TrainingRunCallback(run, optimizer, max_run_steps=STEPS)
        trainer = Trainer(
            model,
            arguments(Path(directory), max_steps=100 * STEPS, seed=number),
            train_dataset=rows(48, seed=number),
            optimizers=callback.optimizers,
            callbacks=[callback],
        )
        trainer.remove_callback(PrinterCallback)  # only events are said here
        say("joined", peers=run.initial_peers, digest=digest(model))
        meet_until_told_to_go(run)
        trainer.train()
        say("done", steps=run.num_steps, digest=digest(model), losses=losses(trainer), members=len(run.last_group))
        sys.stdin.readline()


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    main(task["number"], task.get("peers", []))
