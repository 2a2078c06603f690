"""Tables of tokens on disk: those of old runs go, and none that somebody uses."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest

from swarm_training.data import token_cache
from swarm_training.data.blocks import TokenBlocks

LONG_AGO_S = time.time() - 400 * 24 * 3600


def opened(directory: Path) -> TokenBlocks:
    return TokenBlocks.pack_to_disk(directory, ["abcd"], lambda text: list(text.encode()), None, 2)


def age(directory: Path) -> None:
    for file in directory.iterdir():
        os.utime(file, (LONG_AGO_S, LONG_AGO_S))


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_tables_that_were_not_used_for_long_are_removed_when_another_is_made(tmp_path: Path) -> None:
    for name in ("old", "older version's", "recent", "again"):
        opened(tmp_path / name)
    used = opened(tmp_path / "used")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    (tmp_path / "older version's" / ".lock").unlink()
    gc.collect()
    for name in ("old", "older version's", "again", "used", "foreign"):
        age(tmp_path / name)
    opened(tmp_path / "again")
    assert "old" in names(tmp_path)  # no room is needed for a table that is there
    opened(tmp_path / "new")
    assert names(tmp_path) == {"recent", "again", "used", "foreign", "new"}
    assert used.rows(np.array([1, 0])).tolist() == [list(b"cd"), list(b"ab")]
    del used
    gc.collect()
    opened(tmp_path / "newer")
    assert names(tmp_path) == {"recent", "again", "foreign", "new", "newer"}


def test_a_table_whose_making_failed_is_not_locked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least a block"):
        TokenBlocks.pack_to_disk(tmp_path / "empty", [], lambda text: [], None, 2)
    age(tmp_path / "empty")
    opened(tmp_path / "new")
    assert names(tmp_path) == {"new"}


def test_a_cache_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object, **__: object) -> None:
        raise OSError("no locks available")

    opened(tmp_path / "old")
    gc.collect()
    age(tmp_path / "old")
    for name in ("lock", "try_lock"):
        monkeypatch.setattr(token_cache, name, unsupported)
    assert len(opened(tmp_path / "new")) == 2
    assert names(tmp_path) == {"old", "new"}


def test_a_table_that_was_removed_only_in_part_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, **_: object) -> None:
        if path.exists():
            (path / "tokens.bin").unlink()
            raise OSError("interrupted")

    opened(tmp_path / "old")
    gc.collect()
    age(tmp_path / "old")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", interrupted)
        opened(tmp_path / "new")
    assert len(opened(tmp_path / "old")) == 2
    opened(tmp_path / "newer")
    assert names(tmp_path) == {"old", "new", "newer"}
