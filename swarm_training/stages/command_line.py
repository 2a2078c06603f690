"""The command line of training in stages: ``python -m swarm_training.stages serve``, ``trainer`` and ``export``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from swarm_protocol.errors import SwarmError
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_common_flags
from swarm_protocol.process.logs import say_error, start_logging
from swarm_training.commands.flags import add_export_flags, add_joining_flags, joining
from swarm_training.runfile.reading import read_run_file
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands.running import Work, carry_out, device_named
from swarm_training.stages.routing.router import POLICIES, SHORTEST_DELAY

_PROG = "python -m swarm_training.stages"
say = partial(print, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROG, description="Train a model that fits on no machine, in stages.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")

    def command(name: str, work: Callable[[argparse.Namespace], Work], text: str) -> argparse.ArgumentParser:
        subparser = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        subparser.set_defaults(command=work)
        add_common_flags(subparser)
        add_joining_flags(subparser)
        subparser.add_argument("--num-stages", type=int, metavar="N", help="in place of `count` in the run file")
        return subparser

    serve = command("serve", _serve, "hold a stage of the model, until Ctrl-C")
    serve.add_argument("--stage", type=int, metavar="K", help="stage to hold, from 0 on; else where the run is slowest")
    serve.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:1 or xpu")
    serve.add_argument("--memory", metavar="SIZE", help="memory that the process may take, such as 4GiB")
    serve.add_argument("--host", metavar="ADDRESS", help="address to listen on; else that of the route to the peers")
    serve.add_argument("--port", type=int, default=0, help="port of the service; 0: any free port")
    serve.add_argument("--dht-port", type=int, default=0, help="port of the DHT; 0: any free port")
    serve.add_argument("--announce-host", metavar="ADDRESS", help="address at which others reach this machine")
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
    trainer.add_argument("--routing", default=SHORTEST_DELAY, choices=POLICIES, help="how a stage's peer is chosen")

    export = command("export", _export, "write the run as a checkpoint that transformers loads")
    export.add_argument("directory", type=Path, metavar="DIR")
    add_export_flags(export)
    return parser


def _file(args: argparse.Namespace) -> RunFile:
    """Return the run file of the flags. Raises ValueError if the run is not trained in stages."""
    from swarm_training.stages.commands.building import require_stages

    file = read_run_file(args.run_file)
    if args.num_stages is not None:
        file = dataclasses.replace(file, stages=dataclasses.replace(file.stages, count=args.num_stages))
    require_stages(file)
    return file


def _serve(args: argparse.Namespace) -> Work:
    from swarm_protocol.access.tokens import Role
    from swarm_protocol.size import parse_size

    file = _file(args)
    if args.stage is not None and not 0 <= args.stage < file.stages.count:
        raise ValueError(f"--stage is {args.stage}: expected 0 to {file.stages.count - 1}")
    for name in ("port", "dht_port"):
        if not 0 <= getattr(args, name) < 1 << 16:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected 0 to 65535")
    where = {name: getattr(args, name) for name in ("host", "port", "dht_port", "announce_host")}
    memory_bytes = None if args.memory is None else parse_size(args.memory)
    device = device_named(args.device)
    who = joining(args, file, Role.TRAINER, locks=True)
    if args.steps is not None and (args.then_serve is None or args.steps < 1):
        raise ValueError(f"--steps is {args.steps}: expected at least 1, and --then-serve")
    afterwards = None
    if args.then_serve is not None:
        from swarm_training.stages.commands.inference import after_last_step

        afterwards = after_last_step(file, args.then_serve, args.steps, args.quant)

    def work() -> Coroutine[Any, Any, None]:
        from swarm_training.stages.commands.serving import serve

        return serve(file, who, args.stage, say, device, afterwards=afterwards, memory_bytes=memory_bytes, **where)

    return work


def _trainer(args: argparse.Namespace) -> Work:
    from swarm_protocol.access.tokens import Role

    file = _file(args)
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps is {args.steps}: expected at least 1")
    _require_initial_peers(args)
    who = joining(args, file, Role.TRAINER, locks=True)

    def work() -> Coroutine[Any, Any, None]:
        from swarm_training.stages.commands.training import train_run

        return train_run(file, who, args.routing, args.steps, say)

    return work


def _export(args: argparse.Namespace) -> Work:
    from swarm_protocol.access.tokens import Role

    file = _file(args)
    _require_initial_peers(args)
    who = joining(args, file, Role.TRAINER)

    def work() -> Coroutine[Any, Any, None]:
        from swarm_training.stages.commands.exporting import export_run

        return export_run(file, who, args.directory, say, averaged=args.averaged, best=args.best)

    return work


def _require_initial_peers(args: argparse.Namespace) -> None:
    if not args.initial_peers:
        raise ValueError("--initial-peers is missing: expected members of the run, as `serve` prints them")


def main(argv: list[str]) -> None:
    signals.exit_on_interrupt()
    try:
        args = make_parser().parse_args(argv or ["--help"])
        start_logging(args)
        work = args.command(args)
    except (SwarmError, ValueError) as error:
        say_error(error)
        sys.exit(2)
    try:
        carry_out(work)
    except (SwarmError, ValueError) as error:
        say_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(signals.INTERRUPTED)
