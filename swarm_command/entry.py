"""Where ``swarm`` begins: ``swarm server`` is the server's command line, all else the client's.

Only the one that is meant is imported; Ctrl-C ends that quietly.
"""

from __future__ import annotations

import sys

SERVER, SERVER_HELP = "server", "host blocks of a model"


def main() -> None:
    from swarm_protocol.process.signals import exit_on_interrupt

    exit_on_interrupt()
    if sys.argv[1:2] == [SERVER]:
        from swarm_server.command_line import main as server

        server(sys.argv[2:])
    else:
        from swarm_client.command_line import main as client

        client(sys.argv[1:], {SERVER: SERVER_HELP})
