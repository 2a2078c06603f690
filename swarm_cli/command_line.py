"""The client's command line: ``swarm generate "Return a list of"``, ``finetune``, ``status``, …

A command is a function that checks its arguments as far as possible without torch, and returns a function that does
the work. Only the returned function imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from swarm_cli.commands.chat import add_chat
from swarm_cli.commands.demo import add_demo
from swarm_cli.commands.doctor import add_doctor
from swarm_cli.commands.finetune import add_finetune
from swarm_cli.commands.generate import add_generate
from swarm_cli.commands.keys import add_keys
from swarm_cli.commands.serve import add_serve
from swarm_cli.commands.status import add_status
from swarm_cli.quantize.command import add_quantize
from swarm_cli.up.command import add_up
from swarm_protocol.access.member_flags import CONFIG_RULES
from swarm_protocol.process.config_file import Parsers, apply_config, leaves
from swarm_protocol.process.invocation import add_version, run_command, typed
from swarm_protocol.system import spin_little


def make_parser(others: Mapping[str, str] = MappingProxyType({})) -> argparse.ArgumentParser:
    """Return the parser; ``others`` are the names and help texts of commands that other packages run."""
    parser = argparse.ArgumentParser(
        prog=typed(), description="Use a language model whose blocks are served by a swarm."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    for name, text in others.items():
        commands.add_parser(name, help=text)
    client = (add_up, add_generate, add_chat, add_serve, add_finetune, add_status)
    for add in (*client, add_doctor, add_demo, add_quantize, add_keys):
        add(commands)
    return parser


def parse_args(
    argv: list[str], others: Mapping[str, str] = MappingProxyType({}), all_parsers: Callable[[], Parsers] | None = None
) -> argparse.Namespace:
    """Parse the arguments; ``apply_config`` explains ``all_parsers``. Raise ValueError for a wrong config file."""
    parser = make_parser(others)
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    names = [name for (name, *_), _ in leaves(parser)]
    if argv[0] not in names and not argv[0].startswith("-"):
        parser.exit(2, f"error: there is no command {argv[0]!r}: expected {', '.join(dict.fromkeys(names))}\n")
    # Other packages apply the configuration file to their commands themselves.
    own = {name: each for name, each in leaves(parser) if name[0] not in others}
    apply_config(own, argv, CONFIG_RULES, all_parsers)
    return parser.parse_args(argv)


def main(
    argv: list[str] | None = None,
    others: Mapping[str, str] = MappingProxyType({}),
    all_parsers: Callable[[], Parsers] | None = None,
) -> None:
    spin_little()  # where servers of this machine compute, they would wait for the threads of the head
    run_command(lambda: parse_args(sys.argv[1:] if argv is None else argv, others, all_parsers))
