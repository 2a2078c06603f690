"""After the last step: what was trained is written wherever it can be, and served from there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from swarm_protocol.errors import NoSwarm, PeerUnavailable
from swarm_training.checkpoints.whole_directory import CannotWrite
from swarm_training.runfile.reading import parse_run_file
from swarm_training.stages.commands import inference
from swarm_training.stages.commands.collecting import require_new
from swarm_training.stages.commands.inference import (
    Afterwards,
    InferenceContext,
    after_last_step,
    require_untaken,
    serve_trained,
)
from swarm_training.stages.engine.export import export
from swarm_training.stages.engine.settings import Scratch
from swarm_training.stages.engine.stage import Stage
from tests import zoo
from tests.unit.training.stages.commands.test_command_line import PEER, TEXT
from tests.unit.training.stages.engine import passes

LLAMA = zoo.make_config("llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "stage_source", lambda file: None)
    monkeypatch.setattr(inference, "_WRITE_AGAIN_S", 0.0)


def serve(stage: Stage, directory: Path, say: Callable[[str], object] = str) -> None:
    """Ends in an error: nobody is at the address by which the server is to join."""
    nobody: Any = Mock()
    place = InferenceContext(stage, nobody, nobody, [PEER], "127.0.0.1", None)
    with pytest.raises(NoSwarm):
        asyncio.run(serve_trained(parse_run_file(TEXT), Afterwards(directory, 3, "none"), place, say))


def collecting(stages: list[Stage], config: object, *failures: Exception) -> Callable[..., Any]:
    """Stands for ``collect``: all stages can be had, after these failures."""
    left = list(failures)

    async def collect(
        file: object, source: object, records: object, network: object, directory: Path, step: int
    ) -> None:
        if left:
            raise left.pop(0)
        require_new(directory)
        directory.parent.mkdir(exist_ok=True)
        export((stage.state() for stage in stages), config, directory)

    return collect


def has_weights_of(directory: Path, stages: list[Stage]) -> bool:
    return all(inference._other_model(directory, stage) is None for stage in stages)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_a_model_in_the_directory_that_was_trained_so_is_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, directory, said = zoo.make_config(name, num_hidden_layers=2), tmp_path / "model", list[str]()
    monkeypatch.setattr(inference, "collect", None)  # it is not called
    stages = passes.stages_of(Scratch(config, seed=2), 2)
    export((stage.state() for stage in stages), config, directory)
    for stage in stages:
        serve(stage, directory, said.append)
    assert said == []


@pytest.mark.parametrize("there", ["another model", "a damaged model", "another file", "is a file"])
def test_what_was_trained_is_written_beside_a_directory_that_has_something_else(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is nowhere else than in the memory of processes, which must not end."""
    directory, said = tmp_path / "model", list[str]()
    old, stages = (passes.stages_of(Scratch(LLAMA, seed=seed), 2) for seed in (3, 2))
    if there == "is a file":
        directory.write_text("mine")
    elif there == "another file":
        directory.mkdir()
        (directory / "notes").write_text("mine")
    else:
        export((stage.state() for stage in old), LLAMA, directory)
        if there == "a damaged model":
            (directory / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setattr(inference, "collect", collecting(stages, LLAMA))
    beside = tmp_path / "model-2" / "model"  # the model is called like its directory
    for stage in stages:
        serve(stage, directory, said.append)
        assert has_weights_of(beside, stages)
    assert len(said) == 3 and "the model is written beside it" in said[0] and said[1].startswith(f"wrote {beside}")
    if there == "another model":
        assert has_weights_of(directory, old)


def test_a_process_does_not_end_before_what_was_trained_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, said = tmp_path / "model", list[str]()
    failures = [
        CannotWrite("No space left on device"),
        PeerUnavailable("nobody gives stage 1"),
        ValueError("the model is not to be had"),
        PermissionError("not yours"),
    ]
    stages = passes.stages_of(Scratch(LLAMA, seed=2), 2)
    monkeypatch.setattr(inference, "collect", collecting(stages, LLAMA, *(each for each in failures for _ in range(2))))
    serve(stages[0], directory, said.append)
    assert [line.split(":")[0] for line in said] == [*map(str, failures), f"wrote {directory}"]
    assert "keeps its stage, and tries again" in said[0] and has_weights_of(directory, stages)


def test_the_directory_is_checked_before_the_run(tmp_path: Path) -> None:
    file, full, model = parse_run_file(TEXT), tmp_path / "full", tmp_path / "model"
    full.mkdir()
    (full / "notes").write_text("mine")
    with pytest.raises(ValueError, match="full is not empty, and has no model: expected a new directory"):
        after_last_step(file, full, 3, "none")
    export((stage.state() for stage in passes.stages_of(Scratch(LLAMA, seed=2), 2)), LLAMA, model)
    after = after_last_step(file, model, 3, "none")  # of this run, perhaps: who comes late finds it
    require_untaken(after, 3)
    with pytest.raises(ValueError, match="model is not empty, and the run is at step 0 of 3: expected a new directory"):
        require_untaken(after, 0)
    require_untaken(after_last_step(file, tmp_path / "new", 3, "none"), 0)
