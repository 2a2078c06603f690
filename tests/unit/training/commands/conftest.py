from __future__ import annotations

from pathlib import Path

import pytest

from swarm_training.commands import joining
from swarm_training.runfile.settings import RunFile
from tests.unit.training.commands.one_peer import run_file


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    monkeypatch.setattr(joining.platformdirs, "user_cache_path", lambda _name: tmp_path / "cache")
    return run_file(tmp_path)
