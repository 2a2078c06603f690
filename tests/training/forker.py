"""Starts volunteers in forks of one process that has imported everything: many starts for the price of one.

``python -m tests.training.forker FD`` is told over a socket what to do, in lines of JSON: ``{"program": MODULE, "task":
{...}}``, with the two descriptors that are to be stdin and stdout, starts a volunteer, and the answer is its id; the
answer to ``{"wait": PID}`` is the exit code of one that ends. When the forker ends, so do all that it has started.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HEAVY = [
    "hivemind.dht.node",
    "swarm_training.run.training_run",
    "tests.training.volunteer",
    "torch._dynamo",  # the first optimizer of a process imports it
]
_MAX_REQUEST = 1 << 16
_PR_SET_PDEATHSIG = 1


class Forker:
    """The process, for those who want volunteers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.training.forker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
        atexit.register(self._end)

    def start(self, program: str, task: dict[str, Any], stdin: int, stdout: int) -> int:
        """Returns the process id; the descriptors remain the caller's too."""
        return self._ask({"program": program, "task": task}, [stdin, stdout])

    def wait(self, pid: int) -> int:
        """Waits for the end of a volunteer and returns its exit code, as ``subprocess`` has it."""
        return self._ask({"wait": pid}, [])

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        answer = self._socket.recv(_MAX_REQUEST)
        assert answer, "the forker has ended"
        return int(answer)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


@cache
def forker() -> Forker:
    """The one of this process."""
    return Forker()


def serve(asked: socket.socket) -> None:
    """Returns in each fork, once its volunteer has ended, and in the forker when nobody asks any more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, _MAX_REQUEST, 2)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            asked.send(str(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])).encode())
            continue
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            asked.close()
            importlib.import_module(request["program"]).start(request["task"])
            return
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(pid).encode())


if __name__ == "__main__":
    for module in HEAVY:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector of a fork would write to every object, and so copy the page it is on
    serve(socket.socket(fileno=int(sys.argv[1])))
