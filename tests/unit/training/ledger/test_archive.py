"""Ledgers in files: what was written counts, in whatever state a crash has left the file."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_training.ledger.archive import Archive, read_rounds, restored
from swarm_training.ledger.ledger import UserTotal
from tests.unit.training.ledger.members import ADA, ORGANISER, signed_rounds
from tests.unit.training.ledger.test_ledger import LIMITS, a_round, entry, round_of


def totals_in(path: Path) -> dict[str, UserTotal]:
    return restored(path, "run", LIMITS, ORGANISER.public).totals()


def written(path: Path, steps: range) -> Archive:
    archive = Archive(path)
    for step in steps:
        archive.append(a_round(step, 2, 1))
    return archive


def test_a_file_has_all_that_was_added_to_it_however_often_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "run.ledger"
    written(path, range(3))
    assert totals_in(path) == {"ada": UserTotal(6, 3), "bob": UserTotal(3, 3)}
    written(path, range(2, 5))  # of step 2 another round, which adds nothing
    assert totals_in(path) == {"ada": UserTotal(10, 5), "bob": UserTotal(5, 5)}
    assert len(list(read_rounds(path, "run"))) == 6


def test_wherever_the_last_line_was_torn_the_others_count(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    written(path, range(2))
    whole = path.read_bytes()
    begin = whole.rindex(b"\n", 0, -1) + 1  # of the last line
    for size in (1, 20, begin, begin + 5, begin + 100, len(whole) - 2):
        path.write_bytes(whole[:size])
        kept = 1 if size >= begin else 0
        assert len(list(read_rounds(path, "run"))) == kept
        written(path, range(5, 6))
        assert len(list(read_rounds(path, "run"))) == kept + 1
    path.write_bytes(whole[:-1])  # nothing but the line break is missing
    assert len(list(read_rounds(path, "run"))) == 2


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    written(path, range(3))
    whole = bytearray(path.read_bytes())
    lines = [at for at in range(len(whole)) if whole[at - 1 : at] == b"\n"]
    for position in (lines[3] + 2, lines[3] + 500):  # of the checksum, and of the round of the second line
        changed = bytearray(whole)
        changed[position] = ord("0") if changed[position] != ord("0") else ord("1")
        path.write_bytes(changed)
        assert totals_in(path)["ada"] == UserTotal(4, 2)


def test_oldest_steps_are_read_first_so_that_none_is_too_old(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    archive = Archive(path)
    for step in (9, 3, 7, 1):
        archive.append(a_round(step, 1, 1))
    ledger = restored(path, "run", replace(LIMITS, keep_steps=1), ORGANISER.public)
    assert ledger.totals()["ada"] == UserTotal(4, 4) and len(signed_rounds(ledger)) == 1


def test_what_is_not_of_this_run_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    archive = written(tmp_path / "run.ledger", range(1))
    archive.append(round_of(entry(ADA, 1, run="x"), run="x"))
    archive.append(b"noise")
    archive.append(a_round(2, LIMITS.max_samples + 1))
    assert totals_in(archive.path) == {"ada": UserTotal(2, 1), "bob": UserTotal(1, 1)}
    assert "1 rounds in the ledger" in caplog.text and "a round is left out" not in caplog.text
    restored(archive.path, "run", LIMITS, ORGANISER.public, is_own=False)
    assert "a round is left out: " in caplog.text
    assert f"2 lines of {archive.path} are left out: they are damaged, or of another run" in caplog.text


def test_other_files_are_not_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match="is no ledger: expected a file that `swarm train join` has written"):
        Archive(other)
    with pytest.raises(ValueError, match=r"cannot write the ledger .*: Is a directory"):
        Archive(tmp_path)
    with pytest.raises(ValueError, match=r"cannot read the ledger .*: No such file"):
        list(read_rounds(tmp_path / "none", "run"))
    archive = written(tmp_path / "run.ledger", range(1))
    archive.path.unlink()
    archive.path.mkdir()
    archive.append(a_round(1))
    archive.append(a_round(2))
    assert caplog.text.count("cannot write the ledger") == 1
