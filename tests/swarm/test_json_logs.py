"""``--log-format json`` of commands that run, and the bars that only a terminal sees."""

from __future__ import annotations

import json
import signal

import pytest

from tests.swarm.terminal import CTRL_C, Terminal
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


@pytest.mark.slow
@pytest.mark.parametrize(("log_format", "is_shown"), [("text", True), ("json", False)])
def test_loading_blocks_is_shown_to_who_looks(tmp_path, log_format, is_shown):
    with Terminal(*SERVER, "--log-format", log_format, home=tmp_path, module="swarm_server") as terminal:
        assert ("loading blocks:" in terminal.wait_for("ready ")) == is_shown
        if is_shown:
            terminal.wait_for(r"online · blocks 0:2 of 20 · 0\.0 tokens/s · 0 sessions · 0 tokens contributed")
        terminal.type(CTRL_C)
        said = terminal.wait_for_end()
        assert is_shown or "tokens contributed" not in said
        assert terminal.end() == 0
