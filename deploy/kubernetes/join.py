"""Runs a command as a member of the swarm behind a headless Service: ``python3 join.py swarm server …``.

SWARM_SERVERS is the Service's name, and POD_IP this pod's address, if it is a server itself. The servers' peer ids come
from their metrics. Where no server answers for a while, the first pod of a StatefulSet starts the swarm, and every
other pod waits.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import time
import urllib.request

METRICS_PORT, DHT_PORT = 9400, 31338
_TIMEOUT_S, _PAUSE_S = 8.0, 3.0
_MOST_TRIES = 5  # of the first pod: the others may be busy, or may wait for it
_PEER = re.compile(r'^swarm_server_info\{.*\bpeer="(\w+)"', re.MULTILINE)


def member(address: str, port: int = METRICS_PORT) -> str | None:
    """Return the multiaddr of the server at an IP address; None if it does not answer, or has not joined yet."""
    host = f"[{address}]" if ":" in address else address
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=_TIMEOUT_S) as answer:
            found = _PEER.search(answer.read().decode())
    except (OSError, ValueError):
        return None
    return found and f"/ip{6 if ':' in address else 4}/{address}/tcp/{DHT_PORT}/p2p/{found[1]}"


def addresses(service: str) -> list[str]:
    """Return the addresses of all pods behind a headless Service; none while it has no pods."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(service, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def members(service: str, own: str | None, is_first: bool) -> list[str]:
    """Return the multiaddrs of the other servers, as soon as there are any. None come back to the first pod alone."""
    for attempt in itertools.count(1):
        others = [address for address in addresses(service) if address != own]
        found = [peer for peer in map(member, others) if peer is not None]
        if found or (is_first and (not others or attempt >= _MOST_TRIES)):
            return found
        print(f"no server of {service} has joined a swarm yet: trying again", file=sys.stderr, flush=True)
        time.sleep(_PAUSE_S)
    raise AssertionError("the count does not end")


def main() -> None:
    own = os.environ.get("POD_IP")
    is_first = own is not None and socket.gethostname().endswith("-0")
    found = members(os.environ["SWARM_SERVERS"], own, is_first)
    command = [*sys.argv[1:], *(["--initial-peers", *found] if found else [])]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
