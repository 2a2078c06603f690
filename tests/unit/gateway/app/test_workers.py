"""Worker processes that fail at the start of a gateway end it, and say why. ``tests/swarm`` has those that work."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from swarm_gateway.app import workers
from swarm_gateway.app.serving import ServeSettings, listen
from swarm_gateway.app.worker_share import WorkerShare
from swarm_gateway.app.workers import WorkerPool
from swarm_gateway.limits.admission import LocalAdmission
from swarm_protocol.errors import SwarmError
from tests.unit.support import until


async def run_pool(directory: Path, code: str) -> int:
    """Return the exit code of a gateway with two workers that run this code."""
    listener = listen("127.0.0.1", 0)
    return await WorkerPool([sys.executable, "-c", code], 2, LocalAdmission(), listener, directory).run()


async def test_the_error_of_the_first_worker_is_the_gateways(tmp_path: Path) -> None:
    code = f"import sys; open({str(tmp_path / 'begun')!r}, 'x'); sys.exit(3)"
    assert await run_pool(tmp_path, code) == 3  # the other one has not begun: the file can be made once


async def test_a_worker_that_is_killed_at_the_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match="a worker was killed by SIGKILL before all were ready"):
        await run_pool(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


async def test_a_worker_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_RETRY_S", "_RESTART_S"):
        monkeypatch.setattr(workers, name, 0.01)
    program, away, runs = tmp_path / "worker", tmp_path / "away", tmp_path / "runs"
    ready = json.dumps([0, "ready", [["ready"]]]) + "\\n"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        f"open({str(runs)!r}, 'a').write('run ')\n"
        f"os.write(json.loads(os.environ['SWARM_SERVE_WORKER'])['connection'], b'{ready}')\n"
        f"while not os.path.exists({str(away)!r}):\n"
        "    time.sleep(0.01)\n"
    )
    program.chmod(0o700)
    pool = WorkerPool([str(program)], 1, LocalAdmission(), listen("127.0.0.1", 0), tmp_path)
    running = asyncio.create_task(pool.run())
    try:
        await until(lambda: pool._has_greeted)
        program.rename(away)
        await until(lambda: "worker 0 cannot be started at present" in caplog.text or running.done())
        away.rename(program)
        await until(lambda: runs.read_text().count("run") == 2 or running.done())
        assert not running.done()
    finally:
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0


def test_what_one_process_keeps_in_memory_is_in_a_file_of_all_workers() -> None:
    share = WorkerShare(1, 3, 4, "/gateway")
    assert share.files({"history": "none", "responses": None, "batches": None}) == {
        "history": "/gateway/history.sqlite",
        "responses": Path("/gateway/responses.sqlite"),
        "batches": None,
    }
    given = {"history": None, "responses": Path("mine"), "batches": Path("night")}
    assert share.files(given) == given


def test_a_worker_finds_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WorkerShare.of_this_process() is None and ServeSettings().share is None
    share = WorkerShare(1, 3, 4, "/gateway")
    for name, value in share.environment().items():
        monkeypatch.setenv(name, value)
    assert WorkerShare.of_this_process() == share
