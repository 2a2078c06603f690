"""Servers of a launcher where no process may fork, as on macOS: each is a process of its own, which ends with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.swarm.waiting import wait_for

LAUNCHER = """
import sys
from swarm_server.node import local_cluster
sys.platform = "darwin"
local_cluster.main()
"""
ORPHAN = """
import time
from swarm_server.node import local_cluster
local_cluster._end_with_stdin()
print("waits", flush=True)
time.sleep(600)
"""


def test_a_server_is_started_in_a_new_process(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    job = {"arguments": ["--version"], "stdout": str(out), "stderr": str(err), "cores": None}
    command = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdin is not None and launcher.stdout is not None
        launcher.stdin.write(json.dumps(job) + "\n")
        launcher.stdin.flush()
        assert int(launcher.stdout.readline()) not in (0, launcher.pid)
        wait_for(lambda: out.exists() and out.read_text().startswith("swarm "), "it says its version")
        launcher.stdin.close()
        assert launcher.wait() == 0
    assert err.read_text() == ""


def test_it_ends_with_its_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.stdin.close()
        assert process.wait(60) == 98
