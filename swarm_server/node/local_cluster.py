"""A launcher of several servers on one machine: each is ready in a second, because one process imports everything.

``python -m swarm_server.node.local_cluster`` reads a line of JSON for each server from stdin: ``{"arguments": [...],
"stdout": FILE, "stderr": FILE, "cores": [...] or null}``. It prints each process id. Servers end with this process.

Outside Linux, a fork of a process with threads may crash in the system's libraries. There, each server is a process of
its own: this command with the line as an argument. It takes the time of the imports to start.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from swarm_protocol.process.signals import end_with_parent

_ORPHANED = 98  # the exit code of a server whose launcher has ended
_FROM_TERMINAL = [number for name in ("SIGINT", "SIGHUP") if (number := getattr(signal, name, None)) is not None]


def main() -> None:
    if len(sys.argv) > 1:
        _end_with_stdin()
        _serve(json.loads(sys.argv[1]))
    for number in _FROM_TERMINAL:  # the parent process ends the servers
        signal.signal(number, signal.SIG_IGN)
    start = _forked() if sys.platform == "linux" else _spawned()
    for line in sys.stdin:
        print(start(line), flush=True)


def _forked() -> Callable[[str], int]:
    """Return a function that starts a server for a line of input in a fork of this process, and returns its pid."""
    _warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the servers, because nobody waits for them

    def start(line: str) -> int:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _serve(job)
        return pid

    return start


def _spawned() -> Callable[[str], int]:
    """Return a function that starts a server for a line of input in a new process, and returns its pid."""
    servers: list[subprocess.Popen[bytes]] = []  # each ends when its pipe closes, at the latest with this process

    def start(line: str) -> int:
        servers[:] = [server for server in servers if server.poll() is None]  # the poll reaps those that have ended
        command = [sys.executable, "-m", "swarm_server.node.local_cluster", line]
        servers.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return servers[-1].pid

    return start


def _end_with_stdin() -> None:
    """End this process when the writer of its standard input has ended."""
    parent = os.dup(0)

    def wait() -> None:
        os.read(parent, 1)
        os._exit(_ORPHANED)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _warm_up() -> None:
    """Import once what every server needs, including modules that are first needed by the model or an address."""
    with suppress(ImportError):  # asyncio has its own loop
        import uvloop  # noqa: F401

    from swarm_protocol.imports.light_imports import import_transformers

    import_transformers()
    import swarm_server.command_line
    import swarm_server.node.server  # noqa: F401
    from swarm_models.checkpoints.checkpoint import ModelCheckpoint
    from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
    from swarm_models.checkpoints.describing import describe
    from swarm_protocol.net.hivemind_parts import Multiaddr

    describe(ModelCheckpoint.open(locate(DEFAULT_MODEL)).config)
    str(Multiaddr("/ip4/127.0.0.1/tcp/1/p2p/QmR4TDUsi3uun3zmW681rpWdk4avvY9jhyfFH5E55pPZNm"))
    gc.collect()
    gc.freeze()  # a collection in a fork would write to every object, and so copy the pages that the object is on


def _serve(job: dict[str, Any]) -> None:
    """Become a server in a new process; this does not return."""
    code = 99
    try:
        end_with_parent(signal.SIGKILL)
        if sys.platform == "linux":
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if os.name == "posix":
            os.setpgid(0, 0)
        for number in _FROM_TERMINAL:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        if job.get("cores") and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, job["cores"])
        from swarm_server.command_line import main as serve

        serve(job["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a forked process must not go on in its parent's code
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
