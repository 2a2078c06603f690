"""Runs server command lines in forks of one process that has imported everything: many starts for the price of one.

Reads a JSON list of argument lists from stdin, writes a JSON list of outcomes to stdout.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

AT_ONCE = 4
DEADLINE_S = 60.0


def main() -> None:
    import hivemind.dht.node  # noqa: F401
    import uvloop  # noqa: F401

    import swarm_server.server  # noqa: F401

    commands = json.load(sys.stdin)
    running: dict[int, tuple[int, float]] = {}  # the command's number and its start, by pid
    outcomes: dict[int, dict] = {}
    with tempfile.TemporaryDirectory() as directory:
        waiting = list(enumerate(commands))
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, arguments = waiting.pop(0)
                running[start(arguments, Path(directory), number)] = number, time.monotonic()
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                stop_overdue(running)
                time.sleep(0.01)
                continue
            number, started = running.pop(pid)
            outcomes[number] = {
                "code": os.waitstatus_to_exitcode(status),
                "seconds": time.monotonic() - started,
                "left_behind": left_behind(pid),
                **{name: (Path(directory) / f"{number}.{name}").read_text() for name in ("stdout", "stderr")},
            }
    json.dump([outcomes[number] for number in range(len(commands))], sys.stdout)


def start(arguments: list[str], directory: Path, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # whatever it starts can be told by its session
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(directory / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["swarm_server", *arguments]
    from swarm_server.__main__ import main

    try:
        main()
    except SystemExit as end:
        os._exit(end.code)
    finally:
        import traceback

        traceback.print_exc()
        os._exit(99)


def stop_overdue(running: dict[int, tuple[int, float]]) -> None:
    for pid, (_, started) in running.items():
        if time.monotonic() - started > DEADLINE_S:
            os.kill(pid, 9)


def left_behind(session: int) -> list[str]:
    """Command lines of the session's processes that are still there after a while."""
    deadline = time.monotonic() + 10
    while names := [name for pid in filter(str.isdigit, os.listdir("/proc")) if (name := member(pid, session))]:
        if time.monotonic() > deadline:
            return names
        time.sleep(0.02)
    return []


def member(pid: str, session: int) -> str:
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    state, _parent, _group, its_session = fields.split()[:4]
    return name if int(its_session) == session and state != "Z" else ""


if __name__ == "__main__":
    main()
