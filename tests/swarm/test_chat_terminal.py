"""``swarm chat`` as somebody types it."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_server.engine.engine import Engine
from tests.swarm.harness import InProcessServers
from tests.swarm.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, Terminal
from tests.swarm.waiting import DEADLINE_S

LONG = 300  # tokens, which take seconds


def chat(shipped: InProcessServers, home: Path, num_tokens: int) -> Terminal:
    flags = ["--swarm", shipped.swarm, "--temperature", "0", "--max-new-tokens", str(num_tokens)]
    return Terminal("chat", *flags, home=home)


def turns(path: Path) -> list[str]:
    return [message["content"] for message in json.loads(path.read_text())["messages"] if message["role"] == "user"]


@pytest.mark.slow
def test_lines_and_their_history(shipped, tmp_path):
    saved = tmp_path / "talk.json"
    with chat(shipped, tmp_path, 2) as terminal:
        assert "/help shows commands" in terminal.wait_for_prompt()
        terminal.type(f"one\\{ENTER}two{ENTER}")
        terminal.wait_for_prompt()
        terminal.type(f"three{ALT_ENTER}four{ENTER}")
        terminal.wait_for_prompt()
        terminal.paste("five\nsix")
        terminal.type(ENTER)
        terminal.wait_for_prompt()
        terminal.type(f"/sav {saved}{ENTER}")
        assert "error: there is no command /sav" in terminal.wait_for_prompt()
        terminal.type(f"/save {saved}{ENTER}")
        assert f"saved to {saved}" in terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    assert turns(saved) == ["one\ntwo", "three\nfour", "five\nsix"]
    assert (tmp_path / "state" / "swarm" / "chat_history").stat().st_mode & 0o777 == 0o600
    with chat(shipped, tmp_path, 2) as terminal:
        terminal.wait_for_prompt()
        terminal.type(UP + "2" + ENTER)  # the last line of the last conversation
        terminal.wait_for(r"saved to \S+json2")
        terminal.wait_for_prompt()
        terminal.type(f"/exit{ENTER}")
        assert terminal.end() == 0


def test_ctrl_c_stops_the_answer_only(shipped, tmp_path):
    """Also where the history of lines cannot be written."""
    (tmp_path / "state").write_text("no directory")
    saved = tmp_path / "talk.json"
    with chat(shipped, tmp_path, LONG) as terminal:
        terminal.wait_for_prompt()
        terminal.type(f"Return a list of{ENTER}")
        terminal.wait_for("strings")  # the answer has begun
        terminal.type(CTRL_C)
        terminal.wait_for("stopped")
        terminal.wait_for_prompt()
        terminal.type(CTRL_C)
        terminal.wait_for("/exit or Ctrl-D ends the conversation")
        terminal.wait_for_prompt()
        terminal.type(f"/save {saved}{ENTER}")
        terminal.wait_for("saved to")
        terminal.wait_for_prompt()
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    user, assistant = json.loads(saved.read_text())["messages"]
    assert user["content"] == "Return a list of" and "strings" in assistant["content"]


@pytest.mark.slow
def test_the_death_of_a_server_is_a_pause_and_a_dim_line(cluster, tmp_path, monkeypatch):
    num_steps, is_dead, run = itertools.count(), threading.Event(), Engine.run

    def held(engine, batch):
        """Compute the beginning of the answer, and the rest once the other server is dead."""
        if next(num_steps) == 20:
            is_dead.wait(DEADLINE_S)
        return run(engine, batch)

    monkeypatch.setattr(Engine, "run", held)
    with InProcessServers(Path(locate(DEFAULT_MODEL))) as servers:
        servers.start("0:10")
        flags = {"model": servers.model, "swarm": servers.swarm, "blocks": "10:20", "quant": "none"}
        only = cluster.start(*(part for name, value in flags.items() for part in (f"--{name}", str(value))))
        cluster.wait_ready([only])
        with chat(servers, tmp_path, LONG) as terminal:
            terminal.wait_for_prompt()
            terminal.type(f"Return a list of{ENTER}")
            terminal.wait_for("strings")
            only.kill()
            is_dead.set()
            servers.start("10:20")
            terminal.wait_for(r"\r\n\x1b\[2m[^\n]*blocks 10:20 move to [^\n]*\x1b\[0m\r\n")
            terminal.wait_for_prompt()  # the answer has come to its end
            terminal.type(CTRL_D)
            assert terminal.end() == 0
