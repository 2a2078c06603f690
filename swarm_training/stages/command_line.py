"""The command line of training in stages: ``python -m swarm_training.stages serve``, ``trainer`` and ``export``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from swarm_protocol.process import signals
from swarm_protocol.process.invocation import run_command
from swarm_training.commands.flags import (
    add_address_flags,
    add_export_flags,
    add_joining_flags,
    add_run_command,
    address_of,
    joining,
    require_initial_peers,
)
from swarm_training.core.callbacks import Command
from swarm_training.runfile.reading import read_run_file
from swarm_training.runfile.settings import RunFile

_PROG = "python -m swarm_training.stages"
_PRINTED = "members of the run, as `serve` prints them"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROG, description="Train a model that fits on no machine, in stages.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def command(name: str, work: Callable[[argparse.Namespace], Command], text: str) -> argparse.ArgumentParser:
        subparser = add_run_command(commands, name, work, text)
        add_joining_flags(subparser)
        subparser.add_argument("--num-stages", type=int, metavar="N", help="in place of `count` in the run file")
        return subparser

    serve = command("serve", _serve, "hold a stage of the model, until Ctrl-C")
    serve.add_argument("--stage", type=int, metavar="K", help="stage to hold, from 0 on; else where the run is slowest")
    serve.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:1 or xpu")
    serve.add_argument("--memory", metavar="SIZE", help="memory that the process may take, such as 4GiB")
    add_address_flags(serve)
    serve.add_argument(
        "--then-serve",
        type=Path,
        metavar="DIR",
        help="after the last step, write the model there and go on as an inference server of the stage's blocks; the "
        "model is called like the directory",
    )
    serve.add_argument("--steps", type=int, metavar="N", help="last step, for --then-serve; else that of the schedule")
    serve.add_argument("--quant", default="int8", help="quantisation, for --then-serve; as of `swarm server`")

    trainer = command("trainer", _trainer, "take data through the stages, until Ctrl-C")
    trainer.add_argument("--steps", type=int, metavar="N", help="last step of the run; else that of the schedule")

    exporting = command("export", _export, "write the run as a checkpoint that transformers loads")
    add_export_flags(exporting)
    return parser


def _file(args: argparse.Namespace) -> RunFile:
    """Return the run file of the flags. Raises ValueError if the run is not trained in stages."""
    from swarm_training.stages.commands.building import require_stages

    file = read_run_file(args.run_file)
    if args.num_stages is not None:
        file = dataclasses.replace(file, stages=dataclasses.replace(file.stages, count=args.num_stages))
    require_stages(file)
    return file


def _serve(args: argparse.Namespace) -> Command:
    from swarm_training.stages.commands.inference import after_last_step
    from swarm_training.stages.front import hold

    file = _file(args)
    if args.stage is not None and not 0 <= args.stage < file.stages.count:
        raise ValueError(f"--stage is {args.stage}: expected 0 to {file.stages.count - 1}")
    who = dataclasses.replace(joining(args, file, "TRAINER", locks=True), address=address_of(args))
    if args.steps is not None and (args.then_serve is None or args.steps < 1):
        raise ValueError(f"--steps is {args.steps}: expected at least 1, and --then-serve")
    then = None if args.then_serve is None else after_last_step(file, args.then_serve, args.steps, args.quant)
    return hold(file, who, args.stage, args.device, args.memory, afterwards=then)


def _trainer(args: argparse.Namespace) -> Command:
    from swarm_training.stages.front import train

    file = _file(args)
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps is {args.steps}: expected at least 1")
    require_initial_peers(args, _PRINTED)
    return train(file, joining(args, file, "TRAINER", locks=True), end=args.steps)


def _export(args: argparse.Namespace) -> Command:
    from swarm_training.stages.front import export

    file = _file(args)
    require_initial_peers(args, _PRINTED)
    return export(file, joining(args, file, "TRAINER"), args.directory, args.averaged, args.best)


def main(argv: list[str]) -> None:
    signals.exit_on_interrupt()
    run_command(lambda: make_parser().parse_args(argv or ["--help"]))
