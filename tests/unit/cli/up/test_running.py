"""The life of ``swarm up`` with halves that are not there: what it waits for, says and opens, and how it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_cli.up import running
from swarm_cli.up.running import is_browser_wanted, look_at, open_page, run_up
from swarm_protocol.errors import SwarmError
from tests.unit.support import http_server

PAGE = "http://127.0.0.1:8000/"
JOIN = "swarm server --initial-peers /ip4/192.168.1.10/tcp/1/p2p/Qm"
UP = {"servers": 1, "status": "ok", "reasons": [], "own_model": "m", "join_command": JOIN, "join_note": ""}
UNSEEN = UP | {"servers": 0, "status": "down", "reasons": ["the swarm has not been looked at yet"]}
GAP = UP | {"status": "down", "reasons": ["no server holds blocks 2:4 of model m"]}


class Half:
    """A half of ``swarm up``; it becomes ready when somebody looks."""

    def __init__(self, name: str, line: str, ends: list[str]) -> None:
        self.name, self._line, self._ends = name, line, ends
        self._is_ready = False
        self.code: int | None = None

    def get_ready(self) -> None:
        self._is_ready = True

    def line(self, beginning: str) -> str:
        return self._line if self._is_ready and self._line.startswith(beginning) else ""

    def end(self) -> None:
        self._ends.append(self.name)

    def kill(self) -> None:
        self._ends.append(f"{self.name} killed")


class World:
    """Two halves, and what happens in order while ``swarm up`` waits: each function of ``script`` is called once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self.script: list[Callable[[], object]] = []
        self.server = Half("server", "ready model=m", self.happened)
        self.gateway = Half("gateway", f"serving on {PAGE}v1", self.happened)
        self.swarm: dict[str, Any] | None = None
        pause = SimpleNamespace(sleep=lambda _seconds: self.script.pop(0)())
        monkeypatch.setattr("swarm_cli.up.supervisor.time", pause)

    def start(self, half: Half) -> Half:
        self.happened.append(f"{half.name} started")
        return half

    def look(self, page: str) -> dict[str, Any] | None:
        assert page == PAGE
        return self.swarm

    def see(self, swarm: dict[str, Any]) -> Callable[[], None]:
        def see() -> None:
            self.swarm = swarm

        return see

    def run(self, *script: Callable[[], object]) -> list[str]:
        self.script = list(script)
        note = self.happened.append
        run_up(
            lambda: self.start(self.server),
            lambda: self.start(self.gateway),
            self.look,
            lambda page: note(f"opened {page}"),
            note,
        )
        return self.happened


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def interrupted() -> None:
    raise KeyboardInterrupt


def terminated() -> None:
    raise SystemExit(143)


READY = f"Swarm is up at {PAGE} with m: chat, monitor and APIs. Ctrl-C ends it."
ENDING = "Ending: answers get a few seconds, then the server leaves the swarm. Ctrl-C again ends both at once."


@pytest.mark.parametrize("signalled", [interrupted, terminated])
def test_one_after_the_other_until_a_signal(world: World, signalled: Callable[[], None]) -> None:
    steps = (world.server.get_ready, world.gateway.get_ready, world.see(UNSEEN), world.see(UP), signalled)
    assert world.run(*steps) == [
        "server started",
        "gateway started",
        READY,
        f"Another machine joins with: {JOIN}",
        f"opened {PAGE}",
        ENDING,
        "gateway",
        "server",
    ]


def test_a_signal_before_anything_is_ready(world: World) -> None:
    assert world.run(interrupted) == ["server started", ENDING, "server"]


def test_what_is_waited_for_is_said_once(world: World) -> None:
    gap = world.see(GAP)
    happened = world.run(world.server.get_ready, world.gateway.get_ready, gap, gap, gap, world.see(UP), interrupted)
    why = f"Waiting, because no server holds blocks 2:4 of model m. {PAGE}monitor shows the swarm."
    join = f"Another machine joins with: {JOIN}"
    assert happened[2:6] == [why, join, READY, join]


def test_a_swarm_of_one_machine_says_so(world: World) -> None:
    note = "Only this machine can join: servers listen on its loopback. With --host ADDRESS they let others in."
    local = UP | {"join_command": "swarm server", "join_note": note}
    assert note in world.run(world.server.get_ready, world.gateway.get_ready, world.see(local), interrupted)


def test_a_server_that_does_not_start_ends_it_without_a_gateway(world: World) -> None:
    with pytest.raises(SwarmError, match=r"^the server ended with exit code 1$"):
        world.run(lambda: setattr(world.server, "code", 1))
    assert world.happened == ["server started", "server"]


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {"DISPLAY": ":0"}, True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, True),
        (True, {"DISPLAY": ""}, False),
        (True, {}, False),
        (False, {"DISPLAY": ":0"}, False),
    ],
)
def test_a_browser_is_for_people_with_a_display(is_terminal: bool, environment: dict[str, str], expected: bool) -> None:
    assert is_browser_wanted(is_terminal, environment) is expected


def test_the_page_is_opened_and_a_missing_browser_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, is_done = [], threading.Event()

    def show(page: str) -> bool:
        opened.append(page)
        is_done.set()
        raise running.webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(running.webbrowser, "open", show)
    open_page(PAGE)
    assert is_done.wait(60) and opened == [PAGE]


def test_the_monitor_is_asked_with_a_key_and_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        is_right = (request.path, request.headers["Authorization"]) == ("/api/v1/swarm", "Bearer sk-ada")
        return 200 if is_right else 401, json.dumps(UP).encode()

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with http_server(answer) as gateway:
        assert look_at(f"{gateway}/", ["sk-ada"]) == UP
        assert look_at(f"{gateway}/") is None
    assert look_at("http://127.0.0.1:1/") is None
