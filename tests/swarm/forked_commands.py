"""Runs command lines in forks of one process that has imported everything: many starts for the price of one.

``python -m tests.swarm.forked_commands`` reads lines of JSON from stdin, ``{"package": "swarm_server", "commands":
[[...], ...], "cache": DIRECTORY}``, and writes for each a line with a JSON list of outcomes to stdout. Instead of the
name of a package there may be the path of a script.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path

HEAVY = [
    "swarm_server.node.server",
    "swarm_client.generation.generation",
    "swarm_client.model.model",
    "swarm_cli.finetune.trainer",
    "swarm_cli.finetune.training_data",
    "hivemind.dht.node",
    "uvloop",
    "datasets",
    "matplotlib.figure",
]
COMMAND_LINES = {"swarm_client": "swarm_cli"}  # of packages whose commands are in another one
AT_ONCE = 4
DEADLINE_S = 480.0
POLL_S = 0.01


def main() -> None:
    for module in HEAVY:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a fork would write to every object, and so copy the page it is on
    for line in sys.stdin:
        job = json.loads(line)
        os.environ["XDG_CACHE_HOME"] = job["cache"]
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(run_all(job["package"], job["commands"], Path(directory))), flush=True)


def run_all(package: str, commands: list[list[str]], directory: Path) -> list[dict]:
    waiting = list(enumerate(commands))
    running: dict[int, tuple[int, float]] = {}  # the command's number and its start, by pid
    outcomes: dict[int, dict] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, arguments = waiting.pop(0)
            running[start(package, arguments, directory, number)] = number, time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            kill_overdue(running)
            time.sleep(POLL_S)
            continue
        number, _ = running.pop(pid)
        outcomes[number] = {
            "code": os.waitstatus_to_exitcode(status),
            "left_behind": left_behind(pid),
            **{name: (directory / f"{number}.{name}").read_text() for name in ("stdout", "stderr")},
        }
    return [outcomes[number] for number in range(len(commands))]


def start(package: str, arguments: list[str], directory: Path, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()  # whatever it starts can be told by its session
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(directory / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = [package, *arguments]
    code = 0
    try:
        run_main(package)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_main(package: str) -> None:
    if not package.endswith(".py"):
        importlib.import_module(f"{COMMAND_LINES.get(package, package)}.command_line").main()
        return
    sys.path.insert(0, str(Path(package).parent))
    runpy.run_path(package, run_name="__main__")


def kill_overdue(running: dict[int, tuple[int, float]]) -> None:
    for pid, (_, started) in running.items():
        if time.monotonic() - started > DEADLINE_S:
            os.kill(pid, 9)


def left_behind(session: int) -> list[str]:
    """Names of the session's processes that are still there after a while."""
    deadline = time.monotonic() + 60
    while names := [name for pid in filter(str.isdigit, os.listdir("/proc")) if (name := member(pid, session))]:
        if time.monotonic() > deadline:
            return names
        time.sleep(POLL_S)
    return []


def member(pid: str, session: int) -> str:
    """The process's name if it belongs to the session and lives."""
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    state, _parent, _group, its_session = fields.split()[:4]
    return name if int(its_session) == session and state != "Z" else ""


if __name__ == "__main__":
    main()
