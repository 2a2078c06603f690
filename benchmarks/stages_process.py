"""A process of ``train_stages.py``: a peer of a stage whose computing takes a given time, or training in one process.

python benchmarks/stages_process.py peer RUN.toml STAGE|any CALL_S [INITIAL_PEER …]
python benchmarks/stages_process.py local RUN.toml STEPS
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from swarm_protocol.net.identity import Identity
from swarm_training.contract.backend import Joining, PeerAddress
from swarm_training.runfile.reading import read_run_file
from swarm_training.stages.commands import serving
from swarm_training.stages.commands.building import BuiltStage, build, build_micro_batches, stage_source
from swarm_training.stages.peer.placing import PlacementTimes

PACE = PlacementTimes(
    look_s=1.0, check_s=(4.0, 6.0), confirm_s=1.0, cooldown_s=10.0
)  # of machines that live for a minute
say = partial(print, flush=True)


def paced(function: Callable[..., Any], call_s: float) -> Callable[..., Any]:
    """Takes so long, as on a machine of its own, and little of the cores that all processes share."""

    def call(*args: Any, **kwargs: Any) -> Any:
        until_s = time.monotonic() + call_s
        found = function(*args, **kwargs)
        time.sleep(max(until_s - time.monotonic(), 0.0))
        return found

    return call


def peer(run_file: Path, stage: int | None, call_s: float, initial_peers: list[str]) -> None:
    """Forward takes ``call_s``, backward twice that; of the last stage, which has no forward, three times. ``stage``:
    None: that which limits the run, now and later."""

    def paced_build(*args: Any, **kwargs: Any) -> BuiltStage:
        built = build(*args, **kwargs)
        found: Any = built.stage
        found.forward = paced(found.forward, call_s)
        found.backward = paced(found.backward, call_s * (3 if found.is_last else 2))
        return built

    file = read_run_file(run_file)
    serving.build = paced_build
    common = file.run.name, file.run.target_batch_size, tuple(initial_peers), Identity.generate()
    who = Joining(*common, address=PeerAddress("127.0.0.1"))
    asyncio.run(serving.serve(file, who, stage, say, pace=PACE))


def local(run_file: Path, steps: int) -> None:
    """The stock model on the same micro-batches; says when it has taken a step."""
    file = read_run_file(run_file)
    data = build_micro_batches(file)
    model = AutoModelForCausalLM.from_config(stage_source(file).config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=file.optimizer.lr, weight_decay=0.0)
    for step in range(steps):
        for number in range(data.count):
            content = data.at(step, number)
            loss = model(content.ids, labels=content.labels, use_cache=False).loss / data.count
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step + 1}: local")


def main() -> None:
    what, run_file, *rest = sys.argv[1:]
    if what == "local":
        local(Path(run_file), int(rest[0]))
    else:
        peer(Path(run_file), None if rest[0] == "any" else int(rest[0]), float(rest[1]), rest[2:])


if __name__ == "__main__":
    main()
