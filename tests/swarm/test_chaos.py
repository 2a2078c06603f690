"""The benchmark of faults, small: servers die, hang and leave, and every generation ends with the right tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_generations_survive_a_little_of_every_fault(tmp_path):
    file = tmp_path / "chaos.json"
    command = [sys.executable, "benchmarks/chaos.py", "--quick", "--json", str(file)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads(file.read_text())
    assert results["tally"]["num_tokens"] > 0
    assert all(results[section] for section in ("kills", "standby", "hangs", "rates", "leave"))
