"""Conversations in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm_cli.chat import transcript

TURNS = [{"role": "user", "content": "schön, \udce9?"}, {"role": "assistant", "content": "ja"}]  # a byte of Latin-1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_turn_whose_bytes_are_no_utf_8_is_saved_and_read_and_nothing_else_is_left(
    tmp_path: Path, overwrite: bool
) -> None:
    path = tmp_path / "talk.json"
    transcript.save(path, "tiny", TURNS, overwrite=overwrite)
    assert transcript.load(path) == TURNS
    assert path.stat().st_mode & 0o077 == 0 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="is there already: /save!"):
        transcript.save(path, "tiny", TURNS[:0], overwrite=False)
    transcript.save(path, "tiny", TURNS[:0], overwrite=True)
    assert transcript.load(path) == [] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", [".", "/", "talks"])
def test_a_directory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("talks").mkdir()
    with pytest.raises(ValueError, match=f"^{name} is a directory: expected a file"):
        transcript.save(Path(name), "tiny", TURNS, overwrite=overwrite)
