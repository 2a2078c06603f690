"""The command ``swarm config``: the settings in force, and their sources."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm_cli.parsers import all_parsers, config_parser
from swarm_protocol.process.config_file import Name, config_path, default_path, flags_of, read_config_file
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
    table = Table(box=None, header_style="bold")
    if command:
        found = settings.get(command, {})
        for column in ("flag", "value", "from"):
            table.add_column(column)
        for key, action in flags_of(parsers[command]).items():
            value, where = action.default, "default"
            if key in found:
                value, where = found[key].value, _where(found[key].table)
            table.add_row(Text(f"--{key}"), Text(_shown(value)), Text(where))
    else:
        for column in ("command", "flag", "value", "from"):
            table.add_column(column)
        for name, flags in settings.items():
            for key, setting in flags.items():
                table.add_row(*map(Text, (" ".join(name), f"--{key}", _shown(setting.value), _where(setting.table))))
    if table.row_count:
        console.print(table)


def _where(table: Name) -> str:
    return f"[{'.'.join(table)}]" if table else "top of the file"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value is None else str(value)
