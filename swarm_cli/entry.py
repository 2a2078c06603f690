"""The entry point of ``swarm``: the first word selects the command line of the server, training or experts.

All other commands are the client's, except those about all commands. Only the selected one is imported; Ctrl-C ends the
import quietly. Without a word, a person at a terminal chooses in a menu.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from swarm_training.commands.staged import StagesBackend

_GRANT = ["moderate", "grant"]  # `swarm train moderate grant` is the same as `swarm keys grant`


def main() -> None:
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()
    from swarm_protocol.errors import SwarmError

    try:
        _run()
    except SwarmError as error:  # from an import, where no libp2p can be installed: commands show their own errors
        from swarm_protocol.process.logs import say_error

        say_error(error)
        sys.exit(2)


def _run() -> None:
    argv = sys.argv[1:]
    if not argv and _is_at_terminal():
        argv = _chosen()
    from swarm_cli.parsers import COMPLETION, CONFIG, EXPERTS, HELP, SERVER, TRAIN, all_parsers

    command = argv[:1]
    if command == [SERVER]:
        from swarm_server.command_line import main as server

        server(argv[1:], all_parsers, _hold_stage)
    elif command == [TRAIN] and argv[1:3] != _GRANT:
        from swarm_training.command_line import main as train

        train(argv[1:], all_parsers=all_parsers, stages=_stages)
    elif command == [EXPERTS]:
        from swarm_training.experts.command_line import main as experts

        experts(argv[1:], all_parsers)
    elif command == [CONFIG]:
        from swarm_cli.config import main as config

        config(argv[1:])
    elif command == [COMPLETION]:
        from swarm_cli.completion import main as completion

        completion(argv[1:])
    else:
        from swarm_cli.command_line import main as client

        client(["keys", "grant", *argv[3:]] if command == [TRAIN] else argv, HELP, all_parsers)


def _is_at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _chosen() -> list[str]:
    """Return the words of the command that the user chooses in the menu. Exit if the user leaves."""
    from swarm_cli.menu import choose
    from swarm_protocol.process import signals

    signals.unwind_on_signals()
    try:
        words = choose()
    except EOFError:
        words = []
        print()
    except KeyboardInterrupt:
        print()
        sys.exit(signals.INTERRUPTED)
    if not words:
        sys.exit(0)
    signals.exit_on_interrupt()  # while the command is imported
    return words


def _stages() -> StagesBackend:
    """Return what reaches a run in stages, once such a run is asked for."""
    from swarm_training.stages.front import STAGES

    return STAGES


def _hold_stage(args: argparse.Namespace) -> Callable[[], None]:
    """Return the function that serves a stage, which the server needs for ``--train``."""
    from swarm_training.stages.front import serve_stage

    return serve_stage(args)
