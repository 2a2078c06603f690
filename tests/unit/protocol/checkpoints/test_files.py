"""Which GGUF file of several is a model's, in a directory and on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_protocol.checkpoints.files import Directory, HubModel, choose_gguf, locate
from swarm_protocol.errors import CheckpointError


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["README.md", "config.json"], None),
        (["a.Q2_K.gguf", "README.md"], "a.Q2_K.gguf"),
        (["a.Q2_K.gguf", "a.Q4_K_M.gguf", "a.Q8_0.gguf"], "a.Q4_K_M.gguf"),
        (["a-q2_k.gguf", "a-q8_0.gguf"], "a-q8_0.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], "a-00001-of-00002.gguf"),
        (["a.gguf", "mmproj-a.gguf"], "a.gguf"),
        (["q/a.Q4_K_M.gguf"], "q/a.Q4_K_M.gguf"),
        (["a.Q4_K_M.gguf", "a.Q8_0.gguf", "config.json", "onnx/a.safetensors"], "a.Q4_K_M.gguf"),
        (["a.Q4_K_M.gguf", "config.json", "model.safetensors"], None),
    ],
)
def test_the_file_that_is_chosen(names: list[str], chosen: str | None) -> None:
    assert choose_gguf(names, "someone/model") == chosen


@pytest.mark.parametrize("names", [["a.gguf", "b.gguf"], ["a.Q4_K_M.gguf", "b.Q4_K_M.gguf"]])
def test_files_that_leave_the_choice_open(names: list[str]) -> None:
    with pytest.raises(
        CheckpointError, match=r"someone/model has 2 GGUF files, a.*, b.*: say which one with --gguf-file"
    ):
        choose_gguf(names, "someone/model")


def test_a_directory_with_safetensors_is_no_gguf_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert Directory(tmp_path).gguf == "a.gguf"
    (tmp_path / "config.json").touch()
    assert Directory(tmp_path).gguf == "a.gguf"
    (tmp_path / "model.safetensors").touch()
    assert Directory(tmp_path).gguf is None
    assert locate(str(tmp_path / "a.gguf"), None, None).gguf == "a.gguf"


def test_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny-GGUF"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots" / commit / "q").mkdir(parents=True)
    (repository / "snapshots" / commit / "q" / "tiny.Q4_K_M.gguf").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("someone/tiny-GGUF", "someone/tiny-GGUF/q/tiny.Q4_K_M.gguf"):
        files = locate(name, None, None)
        assert isinstance(files, HubModel)
        assert (files.location, files.gguf, files.commit) == (name, "q/tiny.Q4_K_M.gguf", commit)
        assert files.name == "someone/tiny-GGUF/q/tiny.Q4_K_M.gguf"  # whichever way it was named
        assert files.path("q/tiny.Q4_K_M.gguf").is_file()
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    assert locate("someone/tiny-GGUF", None, None).gguf == "q/tiny.Q4_K_M.gguf"
    (repository / "snapshots" / commit / "model.safetensors").touch()
    assert locate("someone/tiny-GGUF", None, None).gguf is None
    with pytest.raises(CheckpointError, match=r"has no other\.gguf in the local cache, and the hub cannot be reached"):
        assert locate("someone/tiny-GGUF/other.gguf", None, None).commit
