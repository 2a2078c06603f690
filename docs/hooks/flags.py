"""A hook of MkDocs that fills in ``{{ flags PACKAGE }}``, tables of a command's flags that are made from its parser,
and ``{{ run file }}``, the example of a run file. No line of a page ends within a flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from swarm_training.runfile.example import example

PACKAGES = ("swarm_server", "swarm_cli", "swarm_training", "swarm_training.stages", "swarm_training.experts")


def on_page_markdown(markdown: str, **_page: object) -> str:
    """Called by MkDocs for every page."""
    markdown = re.sub(r"\{\{ flags ([\w.]+) \}\}", lambda found: "\n".join(lines(found[1])), markdown)
    return re.sub(r"\{\{ run file \}\}", lambda _: example("RUN.toml").rstrip(), markdown)


def on_page_content(html: str, **_page: object) -> str:
    """Called by MkDocs for the HTML of every page: browsers would begin a new line after each hyphen."""
    flag = r'<span style="white-space: nowrap">\g<0></span>'
    return re.sub(r"<code>[^<]+</code>", lambda code: re.sub(r"(?<![\w-])--[a-z][\w-]*", flag, code[0]), html)


def parser_of(package: str) -> argparse.ArgumentParser:
    """Of the package's command line."""
    return import_module(f"{package}.command_line").make_parser()


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Its subcommands by name; those of subcommands as "keys create"."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                below = commands(command)
                found |= {f"{name} {other}": each for other, each in below.items()} if below else {name: command}
    return found


def lines(package: str) -> Iterator[str]:
    parser = parser_of(package)
    subparsers = commands(parser)
    if not subparsers:
        yield from _table(parser)
    for name, command in subparsers.items():
        yield from (f"### `{name}`", "", *_table(command), "")


def _table(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from ("| | | default |", "|---|---|---|")
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        cells = (f"`{_usage(action)}`", (action.help or "").replace("%%", "%"), _default(action.default))
        yield f"| {' | '.join(cells)} |"  # a | within code is no border of a cell


def _usage(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else action.dest.upper())
    if not action.option_strings:
        return action.dest.upper()
    if action.nargs == 0:
        return action.option_strings[-1]
    value = {"+": f"{value} …", "?": f"[{value}]"}.get(action.nargs, value)
    return f"{action.option_strings[-1]} {value}"


def _default(value: object) -> str:
    if value is None or value is False or value in ([], "") or value is argparse.SUPPRESS:
        return ""
    return f"`{value if not isinstance(value, Path) else value.name}`"
