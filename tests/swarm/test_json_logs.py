"""``--log-format json`` of a server that runs."""

from __future__ import annotations

import json
import signal

from tests.swarm.waiting import DEADLINE_S

SERVER = ["--blocks", "0:2", "--quant", "none"]


def test_a_server_writes_lines_of_json(cluster):
    server = cluster.start(*SERVER, "--swarm", "json-logs", "--log-format", "json")
    cluster.wait_ready([server])
    server.signal(signal.SIGTERM)
    assert server.wait_gone(DEADLINE_S)
    lines = [json.loads(line) for line in server.stderr.read_text().splitlines()]
    (ready,) = [line for line in lines if line["message"] == "ready"]
    assert {name: ready[name] for name in server.ready} == server.ready  # as on stdout
    assert {"time", "level", "logger"} <= ready.keys() and len(lines) > 1
