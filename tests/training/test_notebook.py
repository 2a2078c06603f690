"""The notebook's three cells, in a real kernel: it joins a run, is interrupted, and has the model of that step."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_training.checkpoints.checkpoint import parameters_digest
from swarm_training.checkpoints.store import CheckpointDirectory
from tests.marks import SLOW
from tests.training.processes import ROOT, TIMEOUT_S

NUM_STEPS = 3
SWARM = "from swarm_cli.entry import main; main()"
NOTEBOOK = ROOT / "examples/train_together/volunteer.ipynb"
RUN_FILE = """
[run]
name = "from-a-notebook"
target_batch_size = 8
checkpoint_every = 1
checkpoints = "{checkpoints}"
keep = 100000
[model]
preset = "tiny"
tokenizer = "{tokenizer}"
[data]
source = "{source}"
block_length = 32
[optimizer]
name = "adamw"
lr = 1e-3
[batch]
size = 2
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("\n".join(f"def f_{n}(x): return x * {n} + {n**2}" for n in range(400)))
    path = tmp_path / "RUN.toml"
    path.write_text(
        RUN_FILE.format(checkpoints=tmp_path / "checkpoints", tokenizer=DEFAULT_MODEL, source=tmp_path / "texts.txt")
    )
    return path


@pytest.fixture
def founder(run_file: Path) -> Iterator[str]:
    """The address by which others join."""
    process = subprocess.Popen(
        [sys.executable, "-c", SWARM, "train", "join", str(run_file)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        while not (found := re.search(r"--initial-peers (\S+)", line := process.stdout.readline())):
            assert line, "the founder has ended"
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
        assert "left the run after step" in rest


class Interrupting(NotebookClient):
    """Presses the stop button once a cell has printed so many steps."""

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        output = super().process_message(msg, cell, cell_index)
        if not self._was_pressed and len(re.findall(r"^step", _text(cell), re.MULTILINE)) >= NUM_STEPS:
            self._was_pressed = True
            os.kill(self.km.provisioner.pid, signal.SIGINT)
        return output

    _was_pressed = False


@SLOW
def test_a_notebook_joins_in_three_cells(run_file: Path, founder: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    _install, choose, train = notebook.cells
    choose.source = f"run_file = {str(run_file)!r}\ninitial_peers = [{founder!r}]"
    save = nbformat.v4.new_code_cell(
        "from swarm_training.checkpoints.checkpoint import parameters_digest\n"
        "print(parameters_digest(model.state_dict()))"
    )
    notebook.cells = [choose, train, save]
    client = Interrupting(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert "stopped" in _text(train)
    left = re.search(r"left the run after step (\d+)", _text(train))
    assert left is not None
    there = CheckpointDirectory(tmp_path / "checkpoints").read(int(left[1]))
    assert parameters_digest(there.parameters) == _text(save).strip()


def _text(cell: NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)
