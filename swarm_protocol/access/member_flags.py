"""The command-line flags with which clients and servers join a private swarm."""

from __future__ import annotations

import argparse
from pathlib import Path

from swarm_protocol.process.config_file import ConfigRules

ENVIRONMENT = "SWARM_MEMBERSHIP"  # holds the content of a membership file
CONFIG_RULES = ConfigRules(environment={"membership": ENVIRONMENT})


def add_member_flags(parser: argparse.ArgumentParser, identity_help: str) -> None:
    add = parser.add_argument
    add(
        "--membership",
        type=Path,
        metavar="FILE",
        help=f"of a private swarm, from its organiser; or the environment variable {ENVIRONMENT} has its content",
    )
    add(
        "--swarm-key",
        default="",
        metavar="PUBLIC",
        help="only members of this organiser's swarm are taken for servers; a membership says it as well",
    )
    add("--identity", type=Path, metavar="FILE", help=identity_help)
