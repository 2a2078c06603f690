"""A run of one peer with a tiny model: its file, and how it is joined."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_training.commands import joining
from swarm_training.contract.backend import Joining
from swarm_training.data.order import EVERYTHING
from swarm_training.data.settings import DataSettings
from swarm_training.runfile.settings import BatchSettings, ModelSettings, OptimizerSettings, RunFile, RunSettings
from tests.quick_keys import new_identity
from tests.unit.training.fakes import LocalRun

BLOCK, BATCH, TARGET, STEPS = 32, 4, 8, 6
IDENTITY = new_identity()


def run_file(directory: Path) -> RunFile:
    source = directory / "texts.txt"
    source.write_text(
        "\n".join(f"def function_{number}(x): return x * {number} + {number**2}" for number in range(200))
    )
    return RunFile(
        RunSettings("run", TARGET, checkpoint_every=2, checkpoints=str(directory / "checkpoints"), keep=2),
        ModelSettings(preset="tiny", tokenizer=DEFAULT_MODEL),
        DataSettings(str(source), BLOCK),
        OptimizerSettings("adamw", 1e-2, schedule="linear", warmup_steps=2, total_steps=STEPS),
        batch=BatchSettings(size=BATCH),
    )


def who() -> Joining:
    return Joining("run", TARGET, (), IDENTITY)


def prepared(file: RunFile, said: list[str]) -> joining.TrainingSetup:
    return joining.prepare(file, who(), EVERYTHING, "cpu", said.append)


def joined(file: RunFile, said: list[str], make: Callable[..., LocalRun] = LocalRun, **options: Any) -> Any:
    """Train until the end. Return the run, which ``make`` has made with these options."""
    runs: list[LocalRun] = []
    stopping = threading.Event()

    def open_run(_who: Joining, *arguments: Any) -> LocalRun:
        runs.append(make(*arguments, TARGET, **options))
        runs[0].stopping = stopping
        return runs[0]

    joining.take_part(prepared(file, said), who(), open_run, stopping, said.append)
    return runs[0]
