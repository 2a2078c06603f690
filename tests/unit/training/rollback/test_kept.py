"""The last checkpoints are there, in memory or in files, and nothing is left of the others."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pytest

from swarm_training.core.config import RollbackPolicy, TrainingConfig
from swarm_training.rollback.kept import KeptCheckpoints


def digest(step: int) -> bytes:
    return bytes([step]) * 32


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_newest_are_kept_until_they_are_undone(on_disk: bool, tmp_path: Path) -> None:
    kept = KeptCheckpoints(5, 2, tmp_path / "new" if on_disk else None)
    for step in (0, 5, 10):
        assert kept.is_due(step) and not kept.is_due(step + 1)
        kept.keep(step, digest(step), b"state %d" % step)
    assert kept.digests() == {5: digest(5), 10: digest(10)}
    assert kept.read(digest(5)) == b"state 5" and kept.read(digest(0)) is None
    kept.keep(10, digest(11), b"another")
    assert kept.read(digest(10)) is None and kept.read(digest(11)) == b"another"
    kept.discard_after(5)
    assert kept.digests() == {5: digest(5)}
    assert len(list(tmp_path.rglob("*.safetensors"))) == on_disk
    kept.close()
    assert kept.digests() == {} and list(tmp_path.rglob("*")) == [tmp_path / "new"] * on_disk


def test_of_what_cannot_be_written_nothing_is_left(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"the first half")
        raise OSError("the disk is full")

    kept = KeptCheckpoints(1, 2, tmp_path)
    kept.keep(1, digest(1), b"state")
    with pytest.raises(OSError, match="full"):
        kept.keep_written(2, digest(2), write)
    assert kept.digests() == {1: digest(1)} and len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_processes_share_a_directory_without_sharing_files(tmp_path: Path) -> None:
    first, second = KeptCheckpoints(1, 1, tmp_path), KeptCheckpoints(1, 1, tmp_path)
    first.keep(1, digest(1), b"state")
    second.keep(1, digest(1), b"state")
    first.close()
    assert second.read(digest(1)) == b"state"


def test_none_are_kept_where_none_are_wanted(tmp_path: Path) -> None:
    kept = KeptCheckpoints(0, 2, tmp_path)
    assert not kept.is_due(0) and list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint_directory is .*file: "):
        KeptCheckpoints(1, 2, tmp_path / "file")
    with pytest.raises(ValueError, match="checkpoint_every is -1: expected at least 0 steps"):
        TrainingConfig(checkpoint_every=-1)
    with pytest.raises(ValueError, match="checkpoints_kept is 2: expected at least 3, since the oldest must be from"):
        TrainingConfig(checkpoint_every=5, rollback=RollbackPolicy(patience=10))
    assert TrainingConfig(checkpoint_every=5, checkpoints_kept=3, rollback=RollbackPolicy(patience=10))
