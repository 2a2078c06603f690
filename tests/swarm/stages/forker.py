"""Starts ``python -m swarm_training.stages`` in forks of one process that has imported everything, so a start is cheap.

``python -m tests.swarm.stages.forker`` reads lines of JSON from stdin, ``{"arguments": [...], "stdout": FILE, "stderr":
FILE, "cache": DIRECTORY, "namespace": FILE, "look_s": SECONDS, "lie": NAME}``, and answers each with the process id.
When it ends, so do all that it has started.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback

from tests.swarm.network import enter
from tests.swarm.stages.lies import tell

HEAVY = [
    "hivemind.dht.node",
    "swarm_training.stages.commands.exporting",
    "swarm_training.stages.commands.serving",
    "swarm_training.stages.commands.training",
    "swarm_training.stages.command_line",
    "torch._dynamo",  # the first optimizer of a process imports it
    "transformers.models.llama.modeling_llama",
]
PRESUME_GONE_S = 5.0
WAITS: dict[str, dict[str, float]] = {  # by module: what lasts longer in a run over the internet
    "swarm_training.stages.commands.building": {"PRESUME_GONE_S": PRESUME_GONE_S},
    "swarm_training.stages.peer.watch": {"_READ_S": 3.0},
    "swarm_training.stages.trainer.roster": {"LIFETIME_S": 4.0, "_RENEW_S": 1.0},
    "swarm_training.progress.gossip": {"_READ_S": 3.0},
}
_PR_SET_PDEATHSIG = 1


def main() -> None:
    for module in HEAVY:
        importlib.import_module(module)
    for module, waits in WAITS.items():
        for name, seconds in waits.items():
            replace(module, name, seconds)
    gc.collect()
    gc.freeze()  # the collector of a fork would write to every object, and so copy the page it is on
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    libc = ctypes.CDLL(None)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            run(**json.loads(line))
        print(pid, flush=True)


def replace(module: str, name: str, value: float) -> None:
    loaded = importlib.import_module(module)
    assert hasattr(loaded, name), f"{module} has no {name}"
    setattr(loaded, name, value)


def run(
    arguments: list[str], stdout: str, stderr: str, cache: str, namespace: str | None, look_s: float | None, lie: str
) -> None:
    """Never returns. ``namespace``: of the network, if it is another. ``look_s``: for mates, if it differs."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ["XDG_CACHE_HOME"] = cache
    if namespace is not None:
        with open(namespace) as file:
            enter(file.fileno())
    if look_s is not None:
        replace("swarm_training.stages.commands.serving", "LOOK_S", look_s)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, stdout), (2, stderr)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    code = 0
    try:
        if lie:
            tell(lie)
        importlib.import_module("swarm_training.stages.command_line").main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
