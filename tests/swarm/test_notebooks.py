"""The notebooks in a real kernel, from the first cell to the last: they show what their text says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.marks import SLOW
from tests.swarm.processes import all_processes

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))
CELL_S = 300  # that one may take; the machine may be busy


@pytest.mark.promise("notebooks are kept without their outputs")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_no_outputs_are_kept(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type == "markdown" or (cell.outputs, cell.execution_count) == ([], None)


def executed(name: str, place: Path) -> dict[str, str]:
    """What each cell has printed, by the cell's id; its plots are there as image/png."""
    notebook = nbformat.read(ROOT / "examples/notebooks" / name, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.id != "install"]
    client = NotebookClient(notebook, timeout=CELL_S, resources={"metadata": {"path": str(place)}})
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(place), "OMP_NUM_THREADS": "1", "TMPDIR": str(place)}
    client.execute(env={**os.environ, **environment})
    return {cell.id: "".join(map(_shown, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"}


def _shown(output: NotebookNode) -> str:
    kinds = "".join(output.get("data", {}))
    return output.get("text", "") + kinds if output.get("name") != "stderr" else ""


def left_behind(place: Path) -> list[int]:
    """Processes that were started for the notebook and are still there."""
    found = []
    for pid in all_processes():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if pid != os.getpid() and f"XDG_CACHE_HOME={place}\0".encode() in environment:
            found.append(pid)
    return found


@SLOW
def test_generate_and_chat(tmp_path: Path) -> None:
    shown = executed("generate_and_chat.ipynb", tmp_path)
    assert len(re.findall(r"^\d+:\d+ at 127", shown["servers"], re.MULTILINE)) == 3
    whole = shown["model"].partition("\n")[2].strip()
    assert whole.startswith("Return a list of")
    assert whole.startswith(shown["stream"].strip())
    assert shown["sample"].count("* Return a list of") == 3
    assert "blocks 10:20 move to" in shown["kill"]
    assert "the same tokens: True" in shown["kill"]
    models, _, completion = shown["completion"].partition("\n")
    assert models == "['tiny-python-docs']"
    assert whole.startswith(f"Return a list of{completion}")
    assert re.search(r"^\d+ tokens, (stop|length)$", shown["chat"], re.MULTILINE)
    assert left_behind(tmp_path) == []


@SLOW
def test_lora(tmp_path: Path) -> None:
    shown = executed("lora.ipynb", tmp_path)
    found = re.search(r"loss ([\d.]+) at the first step, ([\d.]+) at the last", shown["train"])
    assert found and float(found[2]) < float(found[1]) / 4
    assert "image/png" in shown["curve"]
    before, after = shown["compare"].strip().splitlines()[0], shown["compare"].partition("after,")[2]
    assert "water until it whistles" in after and "whistles" not in before
    assert "'adapter_config.json'" in shown["save"]
    assert "the same text as before it was saved: True" in shown["load"]
    assert left_behind(tmp_path) == []
