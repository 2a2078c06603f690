"""A directory appears with all that is in it, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swarm_training.checkpoints.whole_directory import CannotWrite, require_writable, whole_directory
from tests.unit.training.checkpoints import file_size_limit


@pytest.mark.parametrize("is_there", [False, True])
def test_it_appears_at_the_end(tmp_path: Path, is_there: bool) -> None:
    directory = tmp_path / "new" / "model"
    if is_there:
        directory.mkdir(parents=True)
    with whole_directory(directory) as partial:
        (partial / "more").mkdir()
        (partial / "more" / "file").write_text("text")
        assert not is_there or not any(directory.iterdir())
    assert (directory / "more" / "file").read_text() == "text"
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_a_full_disk_is_told_whatever_library_writes(tmp_path: Path) -> None:
    for write in (
        lambda path: path.write_bytes(bytes(9999)),
        lambda path: save_file({"a": torch.zeros(9999)}, path),
    ):
        told = pytest.raises(CannotWrite, match=r"model: .*File too large")
        with file_size_limit(4096), told, whole_directory(tmp_path / "model") as partial:
            write(partial / "file")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyError("k"), TimeoutError("of a network")])
def test_other_errors_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), whole_directory(tmp_path / "model"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "new" / "model")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=r"cannot write .*file/model: "):
        require_writable(tmp_path / "file" / "model")
    with file_size_limit(0), pytest.raises(CannotWrite, match="File too large"):
        require_writable(tmp_path / "model")
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    with pytest.raises(CannotWrite, match="disk is a mount point: expected a directory in it"):
        require_writable(tmp_path / "disk")
