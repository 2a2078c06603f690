"""Whether the server, or the HTTP API, of this container is well: exits with 0 if it is, and else says why not.

SWARM_HEALTH_URL says whom to ask: a server's metrics, which must say that it is online, or anything that answers 200.
"""

from __future__ import annotations

import os
import sys
import urllib.request

_TIMEOUT_S = 8.0
_ONLINE = 'swarm_server_state{state="online"} 1.0'


def problem(url: str) -> str | None:
    """None if all is well."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        return f"{url} does not answer: {error}"
    if url.endswith("/metrics") and _ONLINE not in text.splitlines():
        return "the server is not online"
    return None


if __name__ == "__main__":
    sys.exit(problem(os.environ.get("SWARM_HEALTH_URL", "http://127.0.0.1:9400/metrics")))
