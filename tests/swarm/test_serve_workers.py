"""``serve --workers 2``: both processes answer, what they share is one gateway's, and one that dies is replaced."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.swarm.serve_process import ServeProcess
from tests.swarm.waiting import DEADLINE_S, wait_for

KEYS = [f"sk-{number}" for number in range(500)]  # each may ask twice in a minute
PER_MINUTE = 2
NUM_STREAMS = 12


@dataclass
class Workers:
    """A gateway of two workers; ``unused``: keys that have not asked yet."""

    serving: ServeProcess
    unused: Iterator[str] = field(default_factory=lambda: iter(KEYS))

    def pids(self) -> dict[int, int]:
        """Return the process of each worker that runs, by the worker's number."""
        found = {}
        for child in psutil.Process(self.serving.pid).children():
            with suppress(psutil.Error, KeyError):  # it has ended, or has just been forked
                found[json.loads(child.environ()["SWARM_SERVE_WORKER"])["number"]] = child.pid
        return found

    @contextmanager
    def only(self, number: int) -> Iterator[None]:
        """Let one worker alone answer."""
        others = [pid for other, pid in self.pids().items() if other != number]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def client(self, key: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or next(self.unused)}"}
        return httpx.Client(base_url=self.serving.url, headers=headers, timeout=DEADLINE_S)

    def post(self, path: str, key: str = "", **body: Any) -> httpx.Response:
        with self.client(key) as client:
            return client.post(path, json={"model": DEFAULT_MODEL} | body)

    def get(self, path: str, key: str = "") -> httpx.Response:
        with self.client(key) as client:
            return client.get(path)

    def streamed(self, prompt: str) -> str:
        """Return the text of a streamed completion of eight tokens."""
        body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
        with self.client() as client, client.stream("POST", "/completions", json=body) as stream:
            *chunks, end = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert end == "[DONE]", end
        return "".join([json.loads(chunk)["choices"][0]["text"] for chunk in chunks])

    def complete(self, key: str = "") -> int:
        return self.post("/completions", key, prompt="Return", max_tokens=1).status_code


@pytest.fixture
def workers(request: pytest.FixtureRequest, cluster: Any, tmp_path: Path) -> Iterator[Workers]:
    """Return a gateway that generates one answer at a time, or as many as the test's parameter says."""
    swarm = f"workers-{os.getpid()}"
    (tmp_path / "keys").write_text("\n".join(KEYS))
    server = cluster.start("--swarm", swarm, "--num-blocks", "20", "--quant", "none")
    cluster.wait_ready([server])
    flags = [
        "--max-active",
        str(getattr(request, "param", 1)),
        "--max-queued",
        "0",
        "--requests-per-minute",
        str(PER_MINUTE),
    ]
    files = ["--api-keys", "keys", "--batches", "batches", "--history", "none"]
    serving = ServeProcess("--workers", "2", "--swarm", swarm, *flags, *files, directory=tmp_path)
    children = psutil.Process(serving.pid).children()
    try:
        yield Workers(serving)
    finally:
        serving.end(signal.SIGKILL)
        for child in children:
            wait_for(lambda child=child: not child.is_running(), "a worker ends with its parent")
        server.kill()


def test_two_workers_are_one_gateway(workers: Workers) -> None:
    assert sorted(workers.pids()) == [0, 1]
    key = next(workers.unused)
    with workers.only(0):
        assert workers.complete(key) == 200
        response = workers.post("/responses", key, input="Return", max_output_tokens=1).json()
    with workers.only(1):
        assert workers.complete(key) == 429  # the limit of a key holds across both
        assert workers.complete() == 200
        assert workers.get(f"/responses/{response['id']}", key).json() == response
        metrics = workers.get("http://" + workers.serving.url.split("/")[2] + "/metrics").text
    counted = dict(re.findall(r'swarm_requests_total\{endpoint="/v1/completions",status="(\d+)"\} ([\d.]+)', metrics))
    assert counted == {"200": "2.0", "429": "1.0"} and "swarm_generations_active 0.0" in metrics

    with workers.only(1):  # the first worker answers batches
        key = next(workers.unused)
        line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
        line["body"] = {"model": DEFAULT_MODEL, "prompt": "Return", "max_tokens": 1}
        with workers.client(key) as client:
            file = client.post("/files", files={"file": ("night", json.dumps(line))}, data={"purpose": "batch"}).json()
            asked = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
            batch = client.post("/batches", json=asked).json()
    wait_for(lambda: workers.get(f"/batches/{batch['id']}", key).json()["status"] == "completed", "the batch is over")


@pytest.mark.parametrize("workers", [NUM_STREAMS], indirect=True)
def test_simultaneous_streams_get_what_each_would_get_alone(workers: Workers) -> None:
    prompts = [f"Return {number % 4}" for number in range(NUM_STREAMS)]
    alone = {prompt: workers.streamed(prompt) for prompt in prompts[:4]}
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        assert list(threads.map(workers.streamed, prompts)) == [alone[prompt] for prompt in prompts]
    assert all(alone.values())


def test_a_killed_worker_is_replaced_and_its_place_comes_back(workers: Workers) -> None:
    before = workers.pids()
    with workers.only(0), workers.client() as client:
        body = {"model": DEFAULT_MODEL, "prompt": "Return", "max_tokens": 900, "stream": True}
        with client.stream("POST", "/completions", json=body) as stream:
            chunks = stream.iter_lines()
            assert next(chunks).startswith("data: ")
            os.kill(before[0], signal.SIGSTOP)
            os.kill(before[1], signal.SIGCONT)
            assert workers.complete() == 429  # the first worker has the only place
            os.kill(before[0], signal.SIGKILL)
            wait_for(lambda: workers.complete() == 200, "the place of the killed worker comes back")
    wait_for(lambda: workers.pids().get(0, before[0]) != before[0], "another worker is started")
    after = workers.pids()
    assert after[1] == before[1]
    with workers.only(0):  # waits until it accepts connections
        assert workers.complete() == 200
    assert workers.serving.end(signal.SIGTERM) == 0
    assert not any(psutil.pid_exists(pid) for pid in after.values())
    log = workers.serving.log.read_text()
    assert "worker 0 was killed by SIGKILL: another one is started" in log and "Traceback" not in log
