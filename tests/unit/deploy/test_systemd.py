"""systemd takes the units, and our command lines take what the units start."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_cli import command_line as client
from swarm_cli.commands.serve import serve_command
from swarm_gateway.app.serving import ServeSettings
from swarm_server import command_line as server
from tests.unit.deploy.places import DEPLOY

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MOST_EXPOSURE = 20  # tenths of what `systemd-analyze security` says, of 100; 90 and more is unsafe


def start_of(unit: str) -> list[str]:
    """The arguments that the unit gives to ``swarm``."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(DEPLOY / "systemd" / unit)
    program, *arguments = shlex.split(parser["Service"]["ExecStart"])
    assert program == "/opt/swarm/bin/swarm"
    return arguments


def test_the_command_of_a_server_is_accepted() -> None:
    name, *arguments = start_of("swarm-server@.service")
    assert name == "server"
    argv = [each.replace("/etc/swarm/%i.toml", str(DEPLOY / "systemd/server.toml")) for each in arguments]
    config = server.read_config(server.parse_args(argv))
    assert (config.port, config.dht_port, config.metrics_port, config.host) == (31337, 31338, 9400, "0.0.0.0")


def test_the_command_of_the_http_api_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "api-keys").write_text("sk-ada\n")
    replaced = {"/etc/swarm/serve.toml": str(DEPLOY / "systemd/serve.toml"), "%d": str(tmp_path)}
    argv = start_of("swarm-serve.service")
    for old, new in replaced.items():
        argv = [each.replace(old, new) for each in argv]
    args = client.parse_args(argv)
    serve_command(args)
    settings = ServeSettings.from_flags(args)
    assert (settings.host, settings.port, settings.keys) == ("0.0.0.0", 8000, ("sk-ada",))


def analyze(*arguments: str, cwd: Path) -> str:
    """What ``systemd-analyze`` says; the test fails if it does."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not there")
    done = subprocess.run(["systemd-analyze", *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, as if the package were installed."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/swarm/bin/swarm", sys.executable))
    return tmp_path


def test_units_are_good(installed: Path) -> None:
    assert analyze("verify", *(unit.name for unit in UNITS), cwd=installed) == ""


@pytest.mark.parametrize("unit", [unit.name for unit in UNITS])
def test_units_may_do_little(installed: Path, unit: str) -> None:
    said = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}", unit, cwd=installed)
    assert re.search(r"Overall exposure level for \S+: 1\.\d OK", said)
