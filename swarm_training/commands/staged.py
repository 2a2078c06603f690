"""The commands of ``swarm train`` for runs in stages, which another package carries out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from swarm_training.commands.flags import require_initial_peers
from swarm_training.contract.backend import Joining
from swarm_training.contract.views import RunView
from swarm_training.core.callbacks import Command
from swarm_training.reports.reporter import OpenReporter, parse_report
from swarm_training.runfile.settings import RunFile

STAGE, TRAINER = "stage", "trainer"
_ROLES = f"--as {STAGE} to hold and compute a stage of the model, or --as {TRAINER} to take data through all stages"


@dataclass(frozen=True)
class StagesBackend:
    """The functions of the package that trains in stages."""

    # Holds a stage until Ctrl-C: the stage of these blocks (START:END), else the one where it helps most; on this
    # device; in this much memory (such as 4GiB), else in as much as is useful; with these reports of each step.
    hold: Callable[[RunFile, Joining, str | None, str, str | None, Sequence[OpenReporter]], Command]
    # Takes data through the stages, with these reports of each step.
    train: Callable[[RunFile, Joining, Sequence[OpenReporter]], Command]
    # Writes what was trained into a directory, or its moving average (``averaged``), or of the step with the lowest
    # loss on held-out data (``best``).
    export: Callable[[RunFile, Joining, Path, bool, bool], Command]
    # A context with a function that returns the present view of the run at each call.
    look: Callable[[RunFile, Joining], AbstractContextManager[Callable[[], RunView]]]
    # Returns, for each stage, how to reach the run of its own in which its peers average.
    stage_runs: Callable[[RunFile, Joining], Sequence[Joining]]


Stages = Callable[[], StagesBackend]  # imports the package of stages when it is called


def join_staged(stages: Stages, args: argparse.Namespace, file: RunFile, who: Joining) -> Command:
    """Return the command to hold a stage, or to train through all stages. Raises ValueError if the flags do not fit."""
    if args.role is None:
        raise ValueError(f"{args.run_file} is of a run in stages: expected {_ROLES}")
    reports = [parse_report(text) for text in args.report]
    for name, value in (("--batch-size", args.batch_size), ("--part", args.part)):
        if value is not None:
            raise ValueError(f"{name} is not for a run in stages: its run file says what is in a batch")
    if args.client_mode:
        raise ValueError("--client-mode is not for a run in stages: trainers call the peers of stages")
    if args.role == STAGE:
        return stages().hold(file, who, args.blocks, args.device, args.memory, reports)
    for name in ("blocks", "memory", "host", "port", "dht_port", "announce_host"):
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for --as {STAGE}: a trainer holds no part of the model, and nobody calls it")
    require_initial_peers(args, "members of the run, since a trainer holds no part of it")
    return stages().train(file, who, reports)


def require_unstaged(args: argparse.Namespace) -> None:
    """Raise ValueError if there are flags that are only for runs in stages."""
    for name, value in (("--as", args.role), ("--blocks", args.blocks)):
        if value is not None:
            raise ValueError(
                f"{name} is for a run in stages, and {args.run_file} says no count under [stages]: expected none, as "
                "every peer holds the whole model"
            )


def export_staged(stages: Stages, args: argparse.Namespace, file: RunFile, who: Joining) -> Command:
    """Return the command to export a run in stages. Raises ValueError if there are no stages, or no peers to ask."""
    if not file.stages.count:
        raise ValueError(
            f"{args.run_file} is not of a run in stages: its peers write checkpoints themselves, see `checkpoints` "
            "under [run]"
        )
    require_initial_peers(args, "members of the run")
    return stages().export(file, who, args.directory, args.averaged, args.best)
