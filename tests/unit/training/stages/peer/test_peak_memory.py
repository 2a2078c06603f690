"""The memory of a process with a stage of 156 MB, at its peak: while it steps, and while others take its state."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_training.checkpoints.state_file import StateFile, temporary_file
from swarm_training.pb import training_pb2 as pb
from swarm_training.stages.engine.accumulator import Accumulator
from swarm_training.stages.placement.memory import StageNeeds, room_of
from tests.marks import SLOW
from tests.worlds import stages
from tests.worlds.virtual_time import run_virtually

MICRO_BATCHES, STEPS = 4, 2
SIZES = [(12 << 10, 1024), *[(1024, 1024)] * 25]  # an embedding, and matrices of blocks
NUM_PARAMETERS = sum(rows * columns for rows, columns in SIZES)
ROOM = room_of(StageNeeds(NUM_PARAMETERS, 0, "adamw", "fp32", request_bytes=0), None)
CONFIG = replace(stages.CONFIG, codec="fp32", chunk_elements=1 << 18)
SCRIPT = "from tests.unit.training.stages.peer.test_peak_memory import measure; measure()"


class LargeStage:
    """A stage without blocks, whose gradients are given."""

    is_last, shared = True, ()

    def __init__(self, *_arguments: object) -> None:
        self.parameters = [torch.nn.Parameter(torch.full(size, 0.5)) for size in SIZES]


def memory(kind: str) -> int:
    """Return the memory of this process in bytes. ``kind``: VmRSS for that of now, VmHWM for the peak."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) * 1024


async def step(peer: stages.SimulatedStagePeer, number: int) -> None:
    """Take a step, with as many micro-batches pending at a time as have room."""
    at_a_time = ROOM.pending // (4 * NUM_PARAMETERS)
    for first in range(0, MICRO_BATCHES, at_a_time):
        some = range(first, first + at_a_time)
        for m in some:
            gradients = [torch.full(size, 0.1) for size in SIZES]
            peer.stage_peer.counting.add(
                number, m, "trainer", SimpleNamespace(parameters=gradients, loss_sum=1.0, num_tokens=1)
            )
            del gradients
        for m in some:
            assert await peer.stage_peer.counting.commit(number, m, "trainer")
    while peer.stage_peer.step == number:
        await asyncio.sleep(0.1)


async def given(peer: stages.SimulatedStagePeer) -> StateFile:
    file = temporary_file()
    async for part in peer.peer.state("joiner", pb.StateRequest()):
        file.write(part.data)
    return StateFile(file)


def measure() -> None:
    """Print the peaks, in bytes beyond what the process has at its start: of steps, and of all."""
    torch.set_num_threads(1)
    world: Any = stages
    world.ToyStage = LargeStage
    world.StageWorld.sums = staticmethod(lambda stage: Accumulator(stage, MICRO_BATCHES, torch.float32, ROOM.pending))
    world.optimizer_of = lambda stage: torch.optim.AdamW(stage.parameters)

    async def scenario() -> None:
        warm = torch.nn.Parameter(torch.zeros(1))
        warm.grad = torch.zeros(1)
        torch.optim.AdamW([warm]).step()  # imports what torch needs for its first step
        before = memory("VmRSS")
        peer = stages.StageWorld(1, MICRO_BATCHES, CONFIG).make(0)
        await peer.stage_peer.join(look_s=0.0)
        living = [asyncio.ensure_future(each) for each in (peer.stage_peer.run(), peer.stage_peer.watch.run())]
        for number in range(STEPS):
            await step(peer, number)
        stepping = memory("VmHWM") - before
        digest = peer.state.digest()
        files = await asyncio.gather(given(peer), given(peer))
        peer.state.load(peer.state.moment, files[0])
        assert peer.state.digest() == digest
        print(stepping, memory("VmHWM") - before)
        for task in living:
            task.cancel()

    run_virtually(scenario())


@SLOW
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of the memory from /proc")
def test_a_stage_with_adamw_takes_at_most_eight_times_its_weights_though_two_peers_join() -> None:
    # The C library returns the memory of freed tensors at once: the peak does not depend on how they are placed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    stepping, peak = map(int, result.stdout.split())
    weights = 4 * NUM_PARAMETERS
    assert 6 * weights < stepping, "the measure is sound: weights, optimizer, sums, and the average twice"
    # 7 as a rule, and 8 if the next step's micro-batches come while the average is still used; the rest is small.
    assert peak < 8.2 * weights, f"{peak / weights:.1f} times its weights, {stepping / weights:.1f} while it steps"
    assert peak < stepping + weights
