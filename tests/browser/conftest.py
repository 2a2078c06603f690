"""A browser, and a swarm of processes with a gateway for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from tests.swarm.waiting import DEADLINE_S

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox --headless --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SPANS = ("0:7", "7:14", "14:20")
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
COMMAND = "from swarm_cli.command_line import main; main()"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@dataclass
class Swarm:
    """Two servers for the blocks of the second span, one for each other span, and a gateway.

    Attributes:
        url: of the gateway.
    """

    url: str
    name: str
    cluster: LocalCluster
    servers: list[LocalServer]
    model: str

    def start(self, blocks: str) -> LocalServer:
        options = ("--model", self.model, "--swarm", self.name, "--quant", "none", "--throughput", "100")
        server = self.cluster.start(*options, "--blocks", blocks)
        self.servers.append(server)
        return server

    def find(self, peer_id: str) -> LocalServer:
        (server,) = [server for server in self.servers if server.alive and server.peer_id == peer_id]
        return server

    def completed(self, prompt: str, num_tokens: int) -> str:
        """What the likeliest tokens say."""
        ask = {"model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/completions", json=ask, timeout=DEADLINE_S)
        return answer.raise_for_status().json()["choices"][0]["text"]

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S).text.splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
        return float(value)


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with started_swarm(tmp_path_factory.mktemp("cache")) as swarm:
        yield swarm


@contextmanager
def started_swarm(cache: Path, model: str = DEFAULT_MODEL, spans: Sequence[str] = SPANS) -> Iterator[Swarm]:
    environment = {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    name = f"browser-{os.getpid()}-{model}"
    with LocalCluster(environment) as cluster:
        swarm = Swarm("", name, cluster, [], model)
        cluster.wait_ready([swarm.start(blocks) for blocks in (*spans, spans[1])])
        command = [sys.executable, "-c", COMMAND, "serve", "--model", model, "--swarm", name, "--port", "0"]
        log = cache / "gateway.log"
        with log.open("w") as errors:
            gateway = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **environment}
            )
        try:
            greeting = gateway.stdout.readline()
            assert greeting.startswith("serving on "), log.read_text()
            swarm.url = greeting.split()[-1].removesuffix("/v1")
            yield swarm
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.communicate(timeout=DEADLINE_S)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


def serious_violations(page: Any) -> list[str]:
    """What axe finds on the page of rules that matter much."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    return [
        f"{each['id']}: {node['html'][:120]} {node['failureSummary']}"
        for each in axe.Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


NewPage = Callable[..., Any]


@pytest.fixture
def new_page(browser: Any) -> Iterator[NewPage]:
    """Opens pages: ``new_page(**options of a context)``. None may log an error, so none may violate its policy."""
    contexts, problems = [], []

    def open_page(**options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": WIDE, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(DEADLINE_S * 1000)
        page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(f"a dialog says {dialog.message}"), dialog.dismiss()))
        page.problems = problems
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems
