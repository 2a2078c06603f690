"""What users type: ``swarm server``, or ``python -m swarm_server`` if that is how this process was started."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

CONSOLE_SCRIPT, DISTRIBUTION = "swarm", "swarm-lm"


def typed(command: str = "") -> str:
    """How a user of this process starts ``server``, ``generate`` and so on; without a command, what comes first."""
    if Path((sys.argv or [""])[0]).name == CONSOLE_SCRIPT:
        return f"{CONSOLE_SCRIPT} {command}".rstrip()
    return "python -m swarm_server" if command == "server" else f"python -m swarm_client {command}".rstrip()


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action=_ShowVersion, help="print the version of this package")


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for, unlike argparse's own action."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"{CONSOLE_SCRIPT} {version(DISTRIBUTION)}")
        parser.exit()
