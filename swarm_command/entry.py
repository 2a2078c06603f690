"""Where ``swarm`` begins: ``swarm server`` is the server's command line, ``swarm train`` that of training together.

All else is the client's. Only the one that is meant is imported; Ctrl-C ends that quietly.
"""

from __future__ import annotations

import sys

SERVER, SERVER_HELP = "server", "host blocks of a model"
TRAIN, TRAIN_HELP = "train", "train one model together with others"
_GRANT = ["moderate", "grant"]  # of a run: the same as of a private swarm


def main() -> None:
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()
    if sys.argv[1:2] == [SERVER]:
        from swarm_server.command_line import main as server

        server(sys.argv[2:])
    elif sys.argv[1:2] == [TRAIN] and sys.argv[2:4] != _GRANT:
        from swarm_training.command_line import main as train

        train(sys.argv[2:])
    else:
        from swarm_client.command_line import main as client

        argv = ["keys", "grant", *sys.argv[4:]] if sys.argv[1:2] == [TRAIN] else sys.argv[1:]
        client(argv, {SERVER: SERVER_HELP, TRAIN: TRAIN_HELP})
