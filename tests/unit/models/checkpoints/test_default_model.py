"""Which files the short name of a model stands for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from swarm_models.checkpoints.default_model import ALIASES, DEFAULT_MODEL, check_location, locate, with_gguf_file


def test_the_default_model_ships_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = Path(locate(DEFAULT_MODEL))
    assert (directory / "config.json").is_file()
    assert list(directory.glob("*.safetensors"))


def test_a_path_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert locate(DEFAULT_MODEL) == DEFAULT_MODEL


@pytest.mark.parametrize("name", ["", ".", "..", "/", "bigscience/bloom", "no-such-model", "../models"])
def test_anything_else_is_left_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert locate(name) == name
    assert locate(f"{DEFAULT_MODEL}/../{DEFAULT_MODEL}") == f"{DEFAULT_MODEL}/../{DEFAULT_MODEL}"
    absolute = str(tmp_path / "model")
    assert locate(absolute) == absolute


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_the_file_of_its_package_or_else_the_model_on_the_hub(
    alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ALIASES[alias]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, model.module, None)  # as if it were not installed
    assert locate(alias) == model.hub
    assert locate(model.file) == model.file
    check_location(model.hub)
    monkeypatch.delitem(sys.modules, model.module)
    file = tmp_path / "site" / model.module / model.file
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert locate(alias) == model.hub  # the package is another version, without the file
    file.touch()
    assert locate(alias) == locate(model.file) == str(file)
    check_location(str(file))
    (tmp_path / alias).mkdir()
    assert locate(alias) == alias


def test_where_a_gguf_file_may_be(tmp_path: Path) -> None:
    file = tmp_path / "NAME.gguf"
    file.touch()
    check_location(str(file))
    check_location("owner/model/NAME.gguf", "main")
    assert with_gguf_file("owner/model", "NAME.gguf") == "owner/model/NAME.gguf"
    assert with_gguf_file(str(tmp_path), "NAME.gguf") == str(file)
    assert with_gguf_file("owner/model", None) == "owner/model"
    for name in ("NAME.gguf", "owner/NAME.gguf", str(tmp_path / "other.gguf"), "owner/model/config.json"):
        with pytest.raises(ValueError, match="does not exist"):
            check_location(name)
    with pytest.raises(ValueError, match="is a file: revision 'main' is for models on the hub"):
        check_location(str(file), "main")


def test_where_files_are_needed_at_once_the_swarm_is_no_place_for_them() -> None:
    with pytest.raises(ValueError, match="swarm://owner/model takes files from members: expected a directory"):
        check_location("swarm://owner/model")
