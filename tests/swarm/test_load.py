"""The load test of the benchmarks, small: clients vanish and change their minds, and nobody else notices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nobody_notices_that_others_vanish_or_cancel(tmp_path):
    file = tmp_path / "load.json"
    sizes = ["--sessions", "16", "--seconds", "20", "--warm-up", "8"]
    command = [sys.executable, "benchmarks/load.py", *sizes, "--models", str(tmp_path), "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert file.exists(), result.stderr
    facts = json.loads(file.read_text())["facts"]
    assert {fact["what"]: fact["found"] for fact in facts if not fact["holds"]} == {}, result.stderr
    assert result.returncode == 0
