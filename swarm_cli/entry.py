"""The entry point of ``swarm``: the first word selects the command line of the server, training or experts.

All other commands are the client's, except those about all commands. Only the selected one is imported; Ctrl-C ends the
import quietly.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_GRANT = ["moderate", "grant"]  # of a run: the same as of a private swarm


def main() -> None:
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()
    from swarm_cli.parsers import COMPLETION, CONFIG, EXPERTS, HELP, SERVER, TRAIN, all_parsers

    command = sys.argv[1:2]
    if command == [SERVER]:
        from swarm_server.command_line import main as server

        server(sys.argv[2:], all_parsers, _hold_stage)
    elif command == [TRAIN] and sys.argv[2:4] != _GRANT:
        from swarm_training.command_line import main as train
        from swarm_training.stages.front import STAGES

        train(sys.argv[2:], all_parsers=all_parsers, stages=STAGES)
    elif command == [EXPERTS]:
        from swarm_training.experts.command_line import main as experts

        experts(sys.argv[2:], all_parsers)
    elif command == [CONFIG]:
        from swarm_cli.config import main as config

        config(sys.argv[2:])
    elif command == [COMPLETION]:
        from swarm_cli.completion import main as completion

        completion(sys.argv[2:])
    else:
        from swarm_cli.command_line import main as client

        argv = ["keys", "grant", *sys.argv[4:]] if command == [TRAIN] else sys.argv[1:]
        client(argv, HELP, all_parsers)


def _hold_stage(args: argparse.Namespace) -> Callable[[], None]:
    """Return the function that serves a stage, which the server needs for ``--train``."""
    from swarm_training.stages.front import serve_stage

    return serve_stage(args)
