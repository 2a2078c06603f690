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
from swarm_training.runfile.reading import parse_run_file
from swarm_training.runfile.settings import RunFile
from swarm_training.stages.commands import serving as serving_module
from swarm_training.stages.commands.building import build, build_micro_batches, stage_source, training_config
from swarm_training.stages.commands.exporting import export_run
from swarm_training.stages.commands.looking import look
from swarm_training.stages.commands.serving import serve
from swarm_training.stages.commands.training import train_run
from swarm_training.stages.engine.accumulator import rounded
from swarm_training.stages.engine.boundaries import FILE_NAME
from swarm_training.stages.peer.placing import PlacementTimes
from swarm_training.stages.peer.shared import spans_of
from tests.quick_keys import new_identity
from tests.swarm.waiting import wait_for

TOKENIZER = Path(__file__).parents[2] / "swarm_models" / "shipped" / "tiny-python-docs"
TEXT = """
[run]
name = "whole"
target_batch_size = 8
checkpoint_every = 2
checkpoints = ""
[model]
preset = "tiny"
tokenizer = "{tokenizer}"
[data]
source = "{source}"
block_length = 32
[optimizer]
name = "adamw"
lr = 1e-2
schedule = "linear"
warmup_steps = 2
total_steps = 100
[stages]
count = 2
micro_batch_size = 2
sums = "fp64"
"""
LIMIT_S = 240.0


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "text.txt"
    source.write_text("\n".join(f"The square of {number} is {number * number}." for number in range(400)))
    return TEXT.format(tokenizer=TOKENIZER, source=source)


def one_process(file: RunFile, steps: int) -> dict[str, torch.Tensor]:
    """The parameters of both stages after so many steps; the first has the embeddings, and the last has them too."""
    source, config, data = stage_source(file), training_config(file), build_micro_batches(file)
    built = [build(file, source, index, config) for index in range(2)]
    first, last = (each.stage for each in built)
    shared = [spans_of(stage.names, stage.parameters, stage.shared) for stage in (first, last)]
    for step in range(steps):
        totals = [torch.zeros(stage.num_trained, dtype=torch.float64) for stage in (first, last)]
        for number in range(data.count):
            content = data.at(step, number)
            hidden = first.forward(content.ids).hidden
            found = last.backward(hidden, content.labels, loss_scale=data.loss_scale)
            before = first.backward(content.ids, grad=found.inputs)
            for total, gradients in zip(totals, (before, found), strict=True):
                total += rounded(torch.cat([each.reshape(-1) for each in gradients.parameters]))
        means = [total / data.count for total in totals]
        for (start, stop), (other_start, other_stop) in zip(*shared, strict=True):
            both = means[0][start:stop] + means[1][other_start:other_stop]
            means[0][start:stop] = means[1][other_start:other_stop] = both
        for each, mean in zip(built, means, strict=True):
            each.state.apply(mean)
    parameters = [
        (name, each) for stage in (first, last) for name, each in zip(stage.names, stage.parameters, strict=True)
    ]
    assert shared[0] and all(torch.equal(each, dict(parameters)[name]) for name, each in parameters)
    return dict(parameters)


def require_equal(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert {name for name, _ in model.named_parameters()} <= expected.keys()
    assert all(torch.equal(model.get_parameter(name), each) for name, each in expected.items())


def watched(file: RunFile, who: Joining, step: int) -> RunView:
    """What `swarm train watch` shows once it has heard from all stages: at first it has what is on the DHT."""
    with look(file, who) as see:
        wait_for(lambda: all(stage.step == step for stage in see().stages), "all stages are seen")
        return see()


@asynccontextmanager
async def serving(
    file: RunFile,
    index: int | None,
    *initial_peers: str,
    pace: PlacementTimes | None = None,
    said: list[str] | None = None,
) -> AsyncIterator[str]:
    """A stage in this process, from where its peer moves if there is a pace; the address by which others join."""
    joined = asyncio.get_running_loop().create_future()

    def say(line: str) -> None:
        if said is not None:
            said.append(line)
        if "--initial-peers " in line and not joined.done():
            joined.set_result(line.split("--initial-peers ")[1].split()[0])

    common = file.run.name, file.run.target_batch_size, initial_peers, new_identity()
    who = Joining(*common, address=PeerAddress("127.0.0.1"))
    task = asyncio.ensure_future(serve(file, who, index, say, stays=pace is None, pace=pace))
    try:
        await asyncio.wait([task, joined], return_when=asyncio.FIRST_COMPLETED)
        yield task.result() or "" if task.done() else joined.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param("none", marks=pytest.mark.promise("stages train and export what one process trains, to the bit")),
        "bottleneck:4",
    ],
)
def test_what_two_stages_have_trained_is_exported_as_one_process_has_it(
    text: str, layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, steps = parse_run_file(f'{text}layers = "{layers}"\n'), 3
    monkeypatch.setattr(serving_module, "LOOK_S", 0.5)  # nobody else joins meanwhile

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT_S), serving(file, 0) as address, serving(file, 1, address):
            who = Joining(file.run.name, file.run.target_batch_size, (address,), new_identity())
            said: list[str] = []
            await train_run(file, who, steps, said.append)
            assert [line.split(":")[0] for line in said] == [f"step {step + 1}" for step in range(steps)]
            assert all("4 of 4 micro-batches" in line for line in said)
            view = await asyncio.to_thread(watched, file, replace(who, identity=new_identity()), steps)
            assert [(stage.step, len(stage.peers), stage.holds) for stage in view.stages] == [(steps, 1, False)] * 2
            assert view.step == steps and view.loss is not None and f"loss {view.loss:.3f}" in said[-1]
            assert all(peer.samples_per_s > 0 for peer in view.peers)
            other = replace(file, run=replace(file.run, target_batch_size=16))
            with pytest.raises(ValueError, match="4 micro-batches in this run, and 8 here"):
                await train_run(other, replace(who, identity=new_identity()), "random", steps, said.append)
            await export_run(file, replace(who, identity=new_identity()), tmp_path / "out", said.append)
            assert any(line.endswith("after step 3") for line in said)
            assert ("which no stock model has" in said[-1]) == (layers != "none")
            missing = replace(file, stages=replace(file.stages, count=3))
            with pytest.raises(PeerUnavailable, match=r"nobody is at stage .*2: expected"):
                await export_run(
                    missing, replace(who, identity=new_identity()), tmp_path / "x", said.append, timeout_s=1.0
                )

    asyncio.run(scenario())
    expected = one_process(file, steps)
    if layers != "none":
        between = load_file(tmp_path / "out" / FILE_NAME)
        assert len(between) == 6 and all(torch.equal(expected.pop(name), each) for name, each in between.items())
    require_equal(tmp_path / "out", expected)


def test_a_run_file_with_local_steps_trains_and_is_exported(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas average in two bits, with an outer momentum; what is exported is what they all say they have."""
    monkeypatch.setattr(serving_module, "LOOK_S", 0.5)
    config = stage_source(parse_run_file(text)).config
    config.tie_word_embeddings = False
    config.save_pretrained(tmp_path / "config")
    text = text.replace('preset = "tiny"', f'name_or_path = "{tmp_path / "config"}"').replace('sums = "fp64"', "")
    tables = '[averaging]\ncodec = "2bit"\nerror_feedback = true\n[local]\nbatch_size = 2\nouter_momentum = 0.5\n'
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
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    stages = [build(file, stage_source(file), index, training_config(file)).stage for index in range(2)]
    before = {name: each for stage in stages for name, each in zip(stage.names, stage.parameters, strict=True)}
    for name, parameter in model.named_parameters():
        assert bool(parameter.isfinite().all()) and not torch.equal(parameter, before[name]), name
