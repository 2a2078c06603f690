"""A server with other limits than a user can give: ``python -m tests.attack.attacked_server JSON``."""

from __future__ import annotations

import json
import logging
import sys

from swarm_protocol.span import Span
from swarm_server.command_line import run
from swarm_server.core.config import ServerConfig

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    fields = json.loads(sys.argv[1])
    run(ServerConfig(**{**fields, "blocks": Span.parse(fields["blocks"])}))
