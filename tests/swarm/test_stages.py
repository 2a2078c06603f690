"""A run in stages over a real DHT: what is exported is, bit for bit, what one process trains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swarm_protocol.errors import PeerUnavailable
from swarm_training.contract.backend import Joining, PeerAddress
from swarm_training.contract.views import RunView
from swarm_training.runfile.reading import parse_run_file, read_run_file
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands import serving as serving_module
from swarm_training.stages.commands.building import build, stage_source, training_config
from swarm_training.stages.commands.exporting import export_run
from swarm_training.stages.commands.looking import look
from swarm_training.stages.commands.serving import serve
from swarm_training.stages.commands.training import train_run
from swarm_training.stages.engine.boundaries import FILE_NAME
from tests.quick_keys import new_identity
from tests.swarm.stages.model import assert_equal, one_process, write_run
from tests.swarm.waiting import wait_for

LIMIT_S = 240.0


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(serving_module, "LOOK_S", 0.5)  # nobody else joins meanwhile
    return write_run(tmp_path, 2)


def watched(file: RunFile, who: Joining, step: int) -> RunView:
    """What `swarm train watch` shows once it has heard from all stages: at first it has what is on the DHT."""
    with look(file, who) as see:
        wait_for(lambda: all(stage.step == step for stage in see().stages), "all stages are seen")
        return see()


@asynccontextmanager
async def serving(file: RunFile, index: int, *initial_peers: str, said: list[str] | None = None) -> AsyncIterator[str]:
    """A stage in this process; the address by which others join."""
    joined = asyncio.get_running_loop().create_future()

    def say(line: str) -> None:
        if said is not None:
            said.append(line)
        if "--initial-peers " in line and not joined.done():
            joined.set_result(line.split("--initial-peers ")[1].split()[0])

    common = file.run.name, file.run.target_batch_size, initial_peers, new_identity()
    who = Joining(*common, address=PeerAddress("127.0.0.1"))
    task = asyncio.ensure_future(serve(file, who, index, say, stays=True, pace=None))
    try:
        await asyncio.wait([task, joined], return_when=asyncio.FIRST_COMPLETED)
        yield task.result() or "" if task.done() else joined.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.promise("stages train and export what one process trains, to the bit")
def test_what_two_stages_have_trained_is_exported_as_one_process_has_it(run_file: Path, tmp_path: Path) -> None:
    file, steps = read_run_file(run_file), 3

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), serving(file, 0) as address, serving(file, 1, address):
            who = Joining(file.run.name, file.run.target_batch_size, (address,), new_identity())
            said: list[str] = []
            await train_run(file, who, steps, said.append)
            assert [line.split(":")[0] for line in said] == [f"step {step + 1}" for step in range(steps)]
            assert all("8 of 8 micro-batches" in line for line in said)
            view = await asyncio.to_thread(watched, file, replace(who, identity=new_identity()), steps)
            assert [(stage.step, len(stage.peers), stage.holds) for stage in view.stages] == [(steps, 1, False)] * 2
            assert view.step == steps and view.loss is not None and f"loss {view.loss:.3f}" in said[-1]
            assert all(peer.samples_per_s > 0 for peer in view.peers)
            other = replace(file, run=replace(file.run, target_batch_size=16))
            with pytest.raises(ValueError, match="8 micro-batches in this run, and 16 here"):
                await train_run(other, replace(who, identity=new_identity()), "random", steps, said.append)
            await export_run(file, replace(who, identity=new_identity()), tmp_path / "out", said.append)
            assert any(line.endswith("after step 3") for line in said)
            assert "which no stock model has" not in said[-1]
            missing = replace(file, stages=replace(file.stages, count=3))
            with pytest.raises(PeerUnavailable, match=r"nobody is at stage .*2: expected"):
                await export_run(
                    missing, replace(who, identity=new_identity()), tmp_path / "x", said.append, timeout_s=1.0
                )

    asyncio.run(scenario())
    assert_equal(tmp_path / "out", one_process(run_file, steps)[0])


def test_a_run_file_with_local_steps_and_layers_between_stages_trains_and_is_exported(
    run_file: Path, tmp_path: Path
) -> None:
    """Replicas average in two bits, with an outer momentum; what is exported is what they all say they have."""
    tables = '[averaging]\ncodec = "2bit"\nerror_feedback = true\n[local]\nbatch_size = 2\nouter_momentum = 0.5\n'
    text = run_file.read_text().replace('sums = "fp64"', 'layers = "bottleneck:4"')
    file, rounds, said = parse_run_file(text + tables), 2, list[str]()

    async def scenario() -> None:
        async with (
            asyncio.timeout(LIMIT_S),
            serving(file, 0, said=said) as address,
            serving(file, 1, address),
            serving(file, 1, address),
        ):
            who = Joining(file.run.name, file.run.target_batch_size, (address,), new_identity())
            await train_run(file, who, rounds, said.append)
            await export_run(file, replace(who, identity=new_identity()), tmp_path / "out", said.append)

    asyncio.run(scenario())
    assert any(line.endswith("after step 2") for line in said) and any("the outer optimizer" in line for line in said)
    assert any("which no stock model has" in line for line in said)
    stages = [build(file, stage_source(file), index, training_config(file)).stage for index in range(2)]
    before = {name: each for stage in stages for name, each in zip(stage.names, stage.parameters, strict=True)}
    after = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    between = load_file(tmp_path / "out" / FILE_NAME)
    assert len(between) == 6 and before.keys() == {*after, *between}
    for name, parameter in (*after.items(), *between.items()):
        assert bool(parameter.isfinite().all()) and not torch.equal(parameter, before[name]), name
