"""A directory is served only if it has the model that this process has trained a part of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol.errors import NoSwarm
from swarm_stages.commands.inference import Afterwards, Place, serve_trained
from swarm_stages.engine.export import export
from swarm_stages.engine.settings import Scratch
from swarm_stages.engine.stage import Stage
from swarm_training.runfile.reading import parse_run_file
from tests import zoo
from tests.unit.stages.commands.test_command_line import PEER, TEXT
from tests.unit.stages.engine import passes


def serve(stage: Stage, directory: Path) -> None:
    """Ends in an error: nobody is at the address by which the server is to join, and nobody gives the other stage."""
    nobody: Any = None
    place = Place(stage, nobody, nobody, [PEER], "127.0.0.1", None)
    asyncio.run(serve_trained(parse_run_file(TEXT), Afterwards(directory, 3, "none"), place, lambda line: None))


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
