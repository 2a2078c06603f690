"""A launcher of several servers on one machine: each is ready in a second, because one process imports everything.

``python -m swarm_server.node.local_cluster`` reads a line of JSON for each server from stdin: ``{"arguments": [...],
"stdout": FILE, "stderr": FILE, "cores": [...] or null}``. It prints each process id. Servers end with this process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal a process gets when its parent dies


def main() -> None:
    _warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the servers, because nobody waits for them
    for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal: the parent process ends the servers
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _serve(job)
        print(pid, flush=True)


def _warm_up() -> None:
    """Import once what every server needs, including modules that are first needed by the model or an address."""
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
    """Become a server in a forked process; this does not return."""
    code = 99
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        if job.get("cores"):
            os.sched_setaffinity(0, job["cores"])
        sys.argv = ["swarm_server", *job["arguments"]]
        from swarm_server.command_line import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a forked process must not go on in its parent's code
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
