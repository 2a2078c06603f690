"""The command ``swarm status``."""

from __future__ import annotations

import argparse
import json

from swarm_cli.commands.flags import Command, Commands, add_swarm_flags, swarm_config
from swarm_protocol.process import signals
from swarm_protocol.process.invocation import add_command

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.5, 3600.0  # between two displays of a swarm


def add_status(commands: Commands) -> None:
    parser = add_command(commands, "status", status_command, help="show the swarm's servers and blocks")
    add_swarm_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="show only this model")
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch, a line of it each time")
    parser.add_argument(
        "--watch",
        nargs="?",
        const="2",
        metavar="SECONDS",
        help="show the swarm live, refreshed after so many seconds (by default 2), until Ctrl-C",
    )


def status_command(args: argparse.Namespace) -> Command:
    config = swarm_config(args)
    interval_s = None if args.watch is None else parse_interval(args.watch)

    def run() -> None:
        from rich.console import Console

        from swarm_client.core import background
        from swarm_gateway.monitor.status import as_json, read_status, show
        from swarm_gateway.monitor.watch import watch

        signals.unwind_on_signals()
        if interval_s is not None:
            watch(config, args.model, interval_s, json_lines=args.json)
            return
        snapshot = background.run(read_status(config, args.model))
        if args.json:
            print(json.dumps(as_json(args.swarm, snapshot), indent=2))
        else:
            show(Console(), args.swarm, snapshot)

    return run


def parse_interval(text: str) -> float:
    """Return the seconds between two displays. Raise ValueError if ``text`` is not such a number."""
    try:
        interval_s = float(text)
    except ValueError:
        interval_s = float("nan")
    if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
        allowed = f"{_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g}"
        raise ValueError(f"--watch is {text!r}: expected a number of seconds from {allowed}")
    return interval_s
