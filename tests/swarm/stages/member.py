"""``python -m swarm_training.stages`` with shorter waits.

``python -m tests.swarm.stages.member JSON ARGUMENT...``, where the JSON may have ``look_s``, a time to look for mates,
and ``lie``, one of ``LIES``.
"""

from __future__ import annotations

import importlib
import json
import sys

import torch

from swarm_training.stages.command_line import main
from tests.swarm.stages.lies import tell

PRESUME_GONE_S = 5.0
WAITS: dict[str, dict[str, float]] = {  # by module: what lasts longer in a run over the internet
    "swarm_training.stages.commands.building": {"PRESUME_GONE_S": PRESUME_GONE_S},
    "swarm_training.stages.peer.watch": {"_READ_S": 3.0},
    "swarm_training.stages.trainer.roster": {"LIFETIME_S": 4.0, "_RENEW_S": 1.0},
    "swarm_training.progress.gossip": {"_READ_S": 3.0},
}


def replace(module: str, name: str, value: float) -> None:
    loaded = importlib.import_module(module)
    assert hasattr(loaded, name), f"{module} has no {name}"
    setattr(loaded, name, value)


if __name__ == "__main__":
    how, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    for waiting, waits in WAITS.items():
        for wait, seconds in waits.items():
            replace(waiting, wait, seconds)
    if "look_s" in how:
        replace("swarm_training.stages.commands.serving", "LOOK_S", how["look_s"])
    if "lie" in how:
        tell(how["lie"])
    main(arguments)
