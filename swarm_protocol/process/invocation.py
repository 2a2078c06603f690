"""The command that the user typed: ``swarm server``, or ``python -m swarm_server`` if the process was started so."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm_protocol.errors import SwarmError
from swarm_protocol.imports.versions import DISTRIBUTION
from swarm_protocol.process import signals
from swarm_protocol.process.config_file import add_config_flag
from swarm_protocol.process.logs import FORMATS, LEVELS, say_error, start_logging

CONSOLE_SCRIPT = "swarm"


def typed(command: str = "") -> str:
    """Return what the user types to start this command, as this process was started; without a command, the prefix."""
    if Path((sys.argv or [""])[0]).name == CONSOLE_SCRIPT:
        return f"{CONSOLE_SCRIPT} {command}".rstrip()
    return "python -m swarm_server" if command == "server" else f"python -m swarm_client {command}".rstrip()


def command_like_this(command: str) -> list[str]:
    """Return the program and its first arguments that start another command as this process was started."""
    program, *words = typed(command).split()
    return [sys.argv[0] if program == CONSOLE_SCRIPT else sys.executable, *words]


def run_command(parse: Callable[[], argparse.Namespace]) -> None:
    """Run the command of the arguments that ``parse`` returns.

    An error is shown in one line. The process ends with exit code 2 if the arguments are wrong, and with 1 otherwise.
    """
    try:
        args = parse()
        start_logging(args)
        run = args.command(args)
    except (SwarmError, ValueError) as error:
        say_error(error)
        sys.exit(2)
    try:
        run()
    except (SwarmError, ValueError) as error:
        say_error(error)
        sys.exit(1)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        # Python flushes stdout when it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(signals.INTERRUPTED)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Callable[[argparse.Namespace], Callable[[], None]],
    **texts: Any,
) -> argparse.ArgumentParser:
    """Add a command for ``run_command``, and return its parser, which shows the flags' defaults.

    ``command`` checks the arguments, and returns the work; ``texts`` are arguments of the parser, such as ``help``.
    """
    parser = commands.add_parser(name, **{"formatter_class": argparse.ArgumentDefaultsHelpFormatter} | texts)
    parser.set_defaults(command=command)
    return parser


def add_common_flags(parser: argparse.ArgumentParser, level: str = "warning") -> None:
    """Add the flags that every command has; ``level``: the default log level."""
    parser.add_argument("--log-level", default=level, choices=LEVELS)
    parser.add_argument("--log-format", default="text", choices=FORMATS, help="of what is said on stderr")
    add_config_flag(parser)


def typed_flags(parser: argparse.ArgumentParser, argv: list[str]) -> set[str]:
    """Return the long names, without dashes, of the typed flags. A flag whose value is None counts as not typed."""
    names: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            names.setdefault(action.dest, max(action.option_strings, key=len).removeprefix("--"))
    nothing = argparse.Namespace(**dict.fromkeys(names))  # argparse sets no defaults for what is there
    typed_here = vars(parser.parse_args(argv, nothing))
    return {name for dest, name in names.items() if typed_here[dest] is not None}


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action=_ShowVersion, help="print the version of this package")


class _ShowVersion(argparse.Action):
    """An argparse action that looks the version up only when it is needed, unlike argparse's own action."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"{CONSOLE_SCRIPT} {version(DISTRIBUTION)}")
        parser.exit()
