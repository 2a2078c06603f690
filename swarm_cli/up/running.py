"""The life of ``swarm up``: it starts the server and the gateway, says where they are, and ends with either of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
import urllib.request
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swarm_cli.up.supervisor import ChildProcess, Supervisor
from swarm_gateway.app.serving import SERVING_ON
from swarm_protocol.process.logs import ERASE_LINE, shows_progress
from swarm_protocol.wire.printable import printable

_READY = "ready "  # begins the line of a server that is ready
_LOOK_S = 0.5  # between two looks at the swarm, until the gateway can answer
_TIMEOUT_S = 5.0  # for the gateway, which is on this machine
_MAX_COMMAND = 4000  # characters of a command, which has addresses of several members
Start = Callable[[], ChildProcess]
SwarmJson = Mapping[str, Any]  # of docs/reference/monitor-api.md
Look = Callable[[str], SwarmJson | None]


def say(text: str) -> None:
    """Print a line, in place of the live line that the server may show on the same terminal."""
    is_shared = sys.stdout.isatty() and shows_progress()
    print(f"{ERASE_LINE if is_shared else ''}{text}", flush=True)


def run_up(
    start_server: Start,
    start_gateway: Start,
    look: Look,
    show_page: Callable[[str], None],
    say: Callable[[str], None] = say,
) -> None:
    """Run a server and a gateway until a signal, then end them in order.

    ``look`` gets the address of the gateway's pages, and returns what its monitor says, or None if it does not answer.

    Raises:
        SwarmError: one of the two has ended, and therefore the other one was ended, too.
    """
    with Supervisor() as supervisor:
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            server = supervisor.add(start_server())
            supervisor.wait_for(lambda: server.line(_READY))
            gateway = supervisor.add(start_gateway())
            address = supervisor.wait_for(lambda: gateway.line(SERVING_ON))
            page = address.removeprefix(SERVING_ON).removesuffix("v1")
            swarm = supervisor.wait_for(_Readiness(page, look, say).look, _LOOK_S)
            say(f"Swarm is up at {page} with {printable(swarm['own_model'])}: chat, monitor and APIs. Ctrl-C ends it.")
            say(_joining(swarm))
            show_page(page)
            supervisor.wait_for(lambda: None)
        say("Ending: answers get a few seconds, then the server leaves the swarm. Ctrl-C again ends both at once.")


class _Readiness:
    """A check whether a gateway can answer, which says once what the gateway waits for."""

    def __init__(self, page: str, look: Look, say: Callable[[str], None]) -> None:
        self._page, self._look, self._say = page, look, say
        self._said = ""

    def look(self) -> SwarmJson | None:
        """Return what the monitor says once all blocks of the gateway's model have servers."""
        swarm = self._look(self._page)
        if swarm is None or not swarm["servers"]:  # the gateway does not see the server yet
            return None
        if swarm["status"] != "down":
            return swarm
        reasons = printable("; ".join(swarm["reasons"]))
        if reasons != self._said:
            self._said = reasons
            self._say(f"Waiting, because {reasons}. {self._page}monitor shows the swarm.")
            self._say(_joining(swarm))
        return None


def _joining(swarm: SwarmJson) -> str:
    """Return how another machine joins."""
    command, note = (printable(swarm[name], _MAX_COMMAND) for name in ("join_command", "join_note"))
    if "--initial-peers" not in command and note:  # no other machine can join, and the note says why
        return note
    return f"Another machine joins with: {command}" + (f"\n  {note}" if note else "")


def look_at(page: str, keys: Sequence[str] = ()) -> SwarmJson | None:
    """Return what the gateway with these pages says of its swarm; None if it does not answer."""
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    request = urllib.request.Request(f"{page}api/v1/swarm", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            found: SwarmJson = json.load(response)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return found


def is_browser_wanted(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Return whether a person at a terminal with a display has started this process."""
    has_display = sys.platform in ("darwin", "win32") or any(map(environment.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return is_terminal and has_display


def open_page(page: str) -> None:
    """Open the page in the user's browser, and do not wait for the browser."""

    def show() -> None:
        with contextlib.suppress(webbrowser.Error, OSError):
            webbrowser.open(page)

    threading.Thread(target=show, daemon=True).start()
