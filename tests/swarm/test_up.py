"""``swarm up`` as somebody types it: one command, two processes, and nothing left behind."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swarm.processes import all_processes, is_alive, parent_of
from tests.swarm.terminal import CTRL_C, Terminal
from tests.swarm.waiting import wait_for

LIVE = r"online · blocks 0:20 of 20 · [\d.]+ tokens/s · \d+ sessions? · [\d,]+ tokens contributed"


class Up:
    """A running ``swarm up``.

    Attributes:
        page: the address of the chat page.
        halves: the processes of the server and the gateway, by the command that each runs.
    """

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        said = terminal.wait_for(r"Swarm is up at \S+ with tiny-python-docs")
        self.page = re.search(r"http://127\.0\.0\.1:\d+/", said)[0]
        children = [pid for pid in all_processes() if parent_of(pid) == terminal.pid]
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children}
        self.halves = {"server" if "swarm_server" in line else line[3]: pid for pid, line in lines.items()}
        below = [pid for pid in all_processes() if parent_of(pid) in children]  # libp2p daemons
        self.family = [terminal.pid, *children, *below]

    def complete(self, prompt: str) -> str:
        body = {"model": "tiny-python-docs", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.page}v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["text"]

    def assert_all_is_gone(self) -> None:
        wait_for(lambda: not any(map(is_alive, self.family)), f"of {self.family} none is left")


@pytest.fixture
def up(tmp_path) -> Iterator[Up]:
    flags = ["--port", "0", "--no-browser", "--swarm", "together"]
    with Terminal("up", *flags, home=tmp_path, XDG_CACHE_HOME=str(tmp_path)) as terminal:
        yield Up(terminal)


@pytest.mark.promise("one command starts a server and a gateway, and Ctrl-C ends both")
def test_one_command_answers_and_ends_in_order(up, tmp_path):
    assert up.halves.keys() == {"server", "serve"}
    up.terminal.wait_for("Only this machine can join")
    assert up.complete("Return a list of")
    up.terminal.wait_for(LIVE)
    up.terminal.type(CTRL_C)
    said = up.terminal.wait_for_end()
    assert "Ending: " in said and "error" not in said and "Traceback" not in said
    assert up.terminal.end() == 0
    up.assert_all_is_gone()
    assert not list((tmp_path / "swarm" / "swarms").glob("together/*.json"))  # the server has left, and was not killed
