"""Files that others see whole or not at all: the file system is the truth."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from threading import Thread

import pytest

from swarm_protocol.atomic_file import PARTIAL_SUFFIX, remove_abandoned, write_new, written_atomically


def test_nobody_sees_it_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with written_atomically(path) as partial:
        partial.write_text("half")
        assert not path.exists() and partial.name.endswith(PARTIAL_SUFFIX) and partial.parent == tmp_path
        partial.write_text("whole")
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_what_was_there_stays_if_writing_fails_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), written_atomically(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="No such file"), written_atomically(path):
        pass  # nothing is written
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_taken_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError), written_atomically(tmp_path / "taken") as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("has_links", [True, False])
def test_of_several_new_files_the_first_stays_and_nobody_sees_half_of_one(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened, seen = tmp_path / "file", os.open, []

    def looked(*arguments: object) -> int:
        descriptor = opened(*arguments)
        seen.append(path.exists())
        return descriptor

    def refused(*_paths: Path) -> None:
        raise PermissionError("there are no hard links")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", looked)
        if not has_links:
            patched.setattr(os, "link", refused)
        write_new(path, b"whole")
    assert seen[0] is False and len(seen) == 2 - has_links  # without links there is an empty file for a moment
    with pytest.raises(FileExistsError):
        write_new(path, b"another")
    assert path.read_bytes() == b"whole" and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_have_left_is_removed_in_time(tmp_path: Path) -> None:
    for age_s in (0, 7200):
        with written_atomically(tmp_path / "file") as partial:
            partial.write_text("half")
            left = partial.with_name(f".{age_s}{partial.name}")
            left.write_text("half")
            os.utime(left, (time.time() - age_s,) * 2)
    remove_abandoned(tmp_path)
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == [".0", "fi"]


def test_what_cannot_be_removed_does_not_keep_the_rest(tmp_path: Path) -> None:
    for number in range(20):  # the order in which a directory is read is any
        path = tmp_path / f".{number}{PARTIAL_SUFFIX}"
        path.mkdir() if number % 2 else path.touch()
        os.utime(path, (0, 0))
    remove_abandoned(tmp_path)
    assert all(path.is_dir() for path in tmp_path.iterdir())


def test_where_a_directory_cannot_be_read_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ESTALE, "the server of this file system has forgotten the directory")

    monkeypatch.setattr(os, "scandir", refused)
    remove_abandoned(tmp_path)


def test_many_write_at_once_and_one_of_them_is_there_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(number: int) -> None:
        for _ in range(50):
            with written_atomically(path) as partial:
                partial.write_text(str(number) * 1000)
            text = path.read_text()
            assert len(text) == 1000 and len(set(text)) == 1

    errors: list[BaseException] = []

    def watched(number: int) -> None:
        try:
            write(number)
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=watched, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and list(tmp_path.iterdir()) == [path]
