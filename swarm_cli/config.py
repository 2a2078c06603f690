"""The command ``swarm config``: the settings in force, and their sources."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm_cli.parsers import all_parsers, config_parser
from swarm_protocol.process.config_file import FlagValue, Name, config_path, default_path, flags_of, read_config_file
from swarm_protocol.process.logs import say_error


def main(argv: list[str]) -> None:
    args = config_parser().parse_args(argv)
    try:
        _show(tuple(args.command), argv)
    except ValueError as error:
        say_error(error)
        sys.exit(2)


def _show(command: Name, argv: list[str]) -> None:
    path, parsers = config_path(argv), all_parsers()
    if command and command not in parsers:
        names = ", ".join(" ".join(name) for name in parsers)
        raise ValueError(f"there is no command {' '.join(command)!r}: expected one of {names}")
    console = Console()
    console.print(Text(str(path) if path else f"{default_path()} is not there, and no other file is in force"))
    settings = {} if path is None else read_config_file(path, parsers, lambda: parsers)
    if command:
        found = settings.get(command, {})
        rows = [_in_force(key, found.get(key), action.default) for key, action in flags_of(parsers[command]).items()]
        table = Table("flag", "value", "from", box=None, header_style="bold")
    else:
        rows = [(" ".join(name), *_in_force(*flag)) for name, found in settings.items() for flag in found.items()]
        table = Table("command", "flag", "value", "from", box=None, header_style="bold")
    for cells in rows:
        table.add_row(*map(Text, cells))
    if table.row_count:
        console.print(table)


def _in_force(key: str, setting: FlagValue | None, default: Any = None) -> tuple[str, ...]:
    """Return a flag, its value and its source."""
    if setting is None:
        return f"--{key}", _shown(default), "default"
    where = f"[{'.'.join(setting.table)}]" if setting.table else "top of the file"
    return f"--{key}", _shown(setting.value), where


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
