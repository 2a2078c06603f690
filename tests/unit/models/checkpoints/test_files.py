"""Which GGUF file of several is a model's, in a directory and on the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HTTPError

from swarm_models.checkpoints import files
from swarm_models.checkpoints.files import FileMissing, HubModel, LocalFiles, choose_gguf, locate
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
    assert LocalFiles(tmp_path).gguf == "a.gguf"
    (tmp_path / "config.json").touch()
    assert LocalFiles(tmp_path).gguf == "a.gguf"
    (tmp_path / "model.safetensors").touch()
    assert LocalFiles(tmp_path).gguf is None
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


def test_what_the_local_cache_says_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny"
    for directory, names in (("snapshots", ("config.json", "model.safetensors")), (".no_exist", ("vocab.txt",))):
        (repository / directory / commit).mkdir(parents=True)
        for name in names:
            (repository / directory / commit / name).touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    asked, download = list[str](), files.hf_hub_download

    def counted(repository: str, name: str, **options: Any) -> str:
        asked.append(name)
        return download(repository, name, **options)

    monkeypatch.setattr(files, "hf_hub_download", counted)
    monkeypatch.setattr(files.HfApi, "model_info", lambda *_args, **_options: asked.append("the list"))
    model = HubModel("someone/tiny", commit, None)
    assert model.gguf is None and model.local("model.safetensors") == model.path("model.safetensors")
    assert model.path("config.json").parent.name == model.commit == commit
    assert model.local("vocab.txt") is None
    with pytest.raises(FileMissing, match=r"someone/tiny has no vocab.txt on the hub"):
        model.path("vocab.txt")
    assert asked == ["config.json"]  # which is in the cache for this commit, so that the hub is not asked
    assert model.local("merges.txt") is None and asked[1:] == ["merges.txt"]  # of which nothing is known


NO_ANSWERS = (
    *(HTTPError("reset"), OSError("offline"), ValueError("no JSON"), KeyError("id"), TypeError("null")),
    sys.modules[HTTPError.__module__].InvalidURL("the port is no number"),
    ImportError("a SOCKS proxy needs socksio"),
    RuntimeError("the client has been closed"),
    AttributeError("a list has no get"),
)


@pytest.mark.parametrize("error", NO_ANSWERS, ids=lambda error: type(error).__name__)
def test_a_hub_that_does_not_say_what_it_has_has_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*_arguments: Any, **_options: Any) -> None:
        raise error

    monkeypatch.setattr(files.HfApi, "model_info", model_info)
    model = HubModel("someone/tiny", None, None)
    assert model._listed_files() == [] and not model.is_public
