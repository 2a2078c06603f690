"""A server with other limits than a user can give, which says at SIGUSR1 what it has in use.

python -m tests.attack.attacked_server JSON
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading

from swarm_protocol.span import Span
from swarm_server.core.config import ServerConfig
from swarm_server.net.arrivals import Arrivals
from swarm_server.running import run
from swarm_server.sessions.host import SessionManager


def _say_what_is_in_use() -> None:
    while True:
        signal.sigwait({signal.SIGUSR1})
        living = gc.get_objects()
        inside = {
            "sessions": sum(each.num_sessions for each in living if type(each) is SessionManager),
            "tasks": sum(not each.done() for each in living if type(each) is asyncio.Task),
            "arriving_bytes": sum(each.used_bytes for each in living if type(each) is Arrivals),
        }
        del living
        os.write(sys.stdout.fileno(), json.dumps(inside).encode() + b"\n")


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=_say_what_is_in_use, daemon=True).start()
    fields = json.loads(sys.argv[1])
    run(ServerConfig(**{**fields, "blocks": Span.parse(fields["blocks"])}))
