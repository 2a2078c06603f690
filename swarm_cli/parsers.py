"""The parsers of all commands."""

from __future__ import annotations

import argparse

from swarm_protocol.process.config_file import Parsers, leaves
from swarm_protocol.process.invocation import CONSOLE_SCRIPT, add_version

SERVER, TRAIN, EXPERTS, CONFIG, COMPLETION = "server", "train", "experts", "config", "completion"
HELP = {
    SERVER: "host blocks of a model",
    TRAIN: "train one model together with others",
    EXPERTS: "host experts of a mixture",
    CONFIG: "show the settings in the configuration file",
    COMPLETION: "print a script by which a shell completes commands and flags",
}
SHELLS = ("bash", "zsh", "fish")


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of ``swarm`` with all its subcommands."""
    from swarm_cli.command_line import make_parser as client
    from swarm_server.command_line import make_parser as server
    from swarm_training.command_line import make_parser as train
    from swarm_training.experts.command_line import make_parser as experts

    parser = argparse.ArgumentParser(prog=CONSOLE_SCRIPT)
    add_version(parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    makers = {SERVER: server, TRAIN: train, EXPERTS: experts, CONFIG: config_parser, COMPLETION: completion_parser}
    for name, make in makers.items():
        _add(commands, name, make(), HELP[name])
    below = client()
    for action in below._actions:
        if isinstance(action, argparse._SubParsersAction):
            # argparse keeps the help texts of commands there alone.
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, each in action.choices.items():
                _add(commands, name, each, helps[name])
    return parser


def all_parsers() -> Parsers:
    """Return the parsers of all commands that have no subcommands."""
    return dict(leaves(whole_parser()))


def config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{CONSOLE_SCRIPT} {CONFIG}",
        description="Shows the settings of each command in the configuration file, or all flags of one command with "
        "their values and sources.",
    )
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="such as server, or train join")
    parser.add_argument("--config", metavar="FILE", help="file to read instead of the user's own")
    return parser


def completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{CONSOLE_SCRIPT} {COMPLETION}",
        description=f"Prints a script for a shell; see `{CONSOLE_SCRIPT} {COMPLETION} SHELL | head` for where it goes.",
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, parser: argparse.ArgumentParser, text: str
) -> None:
    commands.add_parser(name, help=text)  # makes the command's line in the help
    commands.choices[name] = parser
