"""A directory is served only if it has the model that this process has trained a part of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from swarm_protocol.errors import NoSwarm
from swarm_stages.commands import inference
from swarm_stages.commands.inference import Afterwards, Place, serve_trained
from swarm_stages.engine.export import export
from swarm_stages.engine.settings import Scratch
from swarm_stages.engine.stage import Stage
from swarm_training.checkpoints.whole_directory import CannotWrite
from swarm_training.runfile.reading import parse_run_file
from tests import zoo
from tests.unit.stages.commands.test_command_line import PEER, TEXT
from tests.unit.stages.engine import passes


def serve(stage: Stage, directory: Path, say: Callable[[str], object] = str) -> None:
    """Ends in an error: nobody is at the address by which the server is to join, and nobody gives the other stage."""
    nobody: Any = Mock()
    place = Place(stage, nobody, nobody, [PEER], "127.0.0.1", None)
    asyncio.run(serve_trained(parse_run_file(TEXT), Afterwards(directory, 3, "none"), place, say))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_model_in_the_directory_must_be_the_one_that_was_trained(name: str, tmp_path: Path) -> None:
    config, directory = zoo.make_config(name), tmp_path / "model"
    stages = passes.stages_of(Scratch(config, seed=2), 2)
    export((stage.state() for stage in stages), config, directory)
    for stage in stages:
        with pytest.raises(NoSwarm):  # it is the same: the server starts
            serve(stage, directory)
    for stage in passes.stages_of(Scratch(config, seed=3), 2):
        with pytest.raises(ValueError, match="has another model than the run: expected a new directory"):
            serve(stage, directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model that was trained so: .*model-00002"):
        serve(stages[0], directory)


def test_a_full_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained is in memory only: a process that ended would take it along."""
    config, directory, said = zoo.make_config("llama"), tmp_path / "model", list[str]()
    stages = passes.stages_of(Scratch(config, seed=2), 2)
    fails = [CannotWrite("cannot write model: No space left on device")] * 2

    async def collect(*arguments: object) -> None:
        if fails:
            raise fails.pop()
        export((stage.state() for stage in stages), config, directory)

    monkeypatch.setattr(inference, "stage_source", lambda file: None)
    monkeypatch.setattr(inference, "collect", collect)
    monkeypatch.setattr(inference, "_WRITE_AGAIN_S", 0.0)
    with pytest.raises(NoSwarm):  # the server starts
        serve(stages[0], directory, said.append)
    assert [line.split(":")[0] for line in said] == ["cannot write model", f"wrote {directory}"]
    assert "keeps its stage, and tries again" in said[0]
