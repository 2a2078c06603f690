"""The command ``swarm completion``: shell scripts that complete commands, flags, choices, and file names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swarm_cli.parsers import completion_parser, whole_parser
from swarm_protocol.process.config_file import leaves
from swarm_protocol.process.invocation import CONSOLE_SCRIPT

_WHERE = {
    "bash": f"{CONSOLE_SCRIPT} completion bash > ~/.local/share/bash-completion/completions/{CONSOLE_SCRIPT}",
    "zsh": f'{CONSOLE_SCRIPT} completion zsh > "${{fpath[1]}}/_{CONSOLE_SCRIPT}"',
    "fish": f"{CONSOLE_SCRIPT} completion fish > ~/.config/fish/completions/{CONSOLE_SCRIPT}.fish",
}
_DIRECTORIES = {"DIR", "DIR|NAME"}
_FILES = {"FILE", "PATH", "NAME_OR_PATH", "RUN.toml", "LEDGER"}


def main(argv: list[str]) -> None:
    shell = completion_parser().parse_args(argv).shell
    print(script(shell))


def script(shell: str) -> str:
    import shtab

    parser = whole_parser()
    for _, each in leaves(parser):
        for action in each._actions:
            kind = _completed(action)
            if kind is not None:
                action.complete = kind  # type: ignore[attr-defined]  # where shtab looks for it
    lines = str(shtab.complete(parser, shell)).splitlines()
    comment = f"# {_WHERE[shell]}"
    # The first line of a zsh script names the completed command.
    return "\n".join([lines[0], comment, *lines[1:]] if lines[0].startswith("#compdef") else [comment, *lines])


def _completed(action: argparse.Action) -> dict[str, Any] | None:
    """Return shtab's name for the words that may follow; None: the parser lists the choices itself."""
    import shtab

    if action.metavar in _DIRECTORIES:
        return dict(shtab.DIRECTORY)
    return dict(shtab.FILE) if action.type is Path or action.metavar in _FILES else None
