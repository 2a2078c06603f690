"""``swarm up`` as it is typed: what is refused, and which flags each half gets."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm_cli.command_line import main, parse_args
from swarm_cli.up import running, supervisor
from swarm_cli.up.command import up_command
from swarm_protocol.access.member_flags import ENVIRONMENT
from tests.unit.support import refusal

PEER = "/ip4/192.168.1.10/tcp/31337/p2p/QmWuXJM1v3RHh9tF3Sy7Xrrn2zvhDQQpuBLRU7QLR5PaMd"


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    return refusal(capsys, lambda: main(["up", "--port", "0", *flags]))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--port", "70000"), "--port is 70000"),
        (("--model", "./nowhere"), "./nowhere does not exist"),
        (("--quant", "int3"), "quantisation 'int3' is unknown"),
        (("--memory", "much"), "size 'much' is not understood"),
        (("--device", "toaster"), "device 'toaster' is unknown"),
        (("--swarm", "a/b"), "swarm name 'a/b' is not usable"),
        (("--initial-peers", "localhost:1"), "is no multiaddr of a peer"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refused(capsys, *flags)


def test_a_port_in_use_is_found_before_the_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(capsys, "--port", str(port))


def test_the_halves_of_a_private_swarm_are_two_members(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    main(["keys", "create", "--out", str(tmp_path / "key")])
    for name, role in (("ada", "server"), ("bob", "client")):
        place = ["--key", str(tmp_path / "key"), "--out", str(tmp_path / name)]
        main(["keys", "grant", "--role", role, "--name", name, "--days", "1", *place])
    capsys.readouterr()
    config = tmp_path / "config.toml"
    config.write_text(f'membership = "{tmp_path}/ada"\n')
    assert "are two members" in refused(capsys, "--config", str(config))
    config.write_text(f'[server]\nmembership = "{tmp_path}/ada"\n[serve]\nmembership = "{tmp_path}/bob"\n')
    up_command(parse_args(["up", "--port", "0", "--config", str(config)]))
    monkeypatch.setenv(ENVIRONMENT, (tmp_path / "ada").read_text())
    assert "are two members" in refused(capsys, "--config", str(config))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``swarm up`` would start, by name, and whether it opens a browser."""
    found: dict[str, Any] = {}

    def child(name: str, command: list[str], *_: Any, **__: Any) -> None:
        found[name] = command

    def run_up(start_server: Any, start_gateway: Any, _look: Any, show_page: Any) -> None:
        start_server()
        start_gateway()
        found["opens"] = show_page is running.open_page

    monkeypatch.setattr(supervisor, "ChildProcess", child)
    monkeypatch.setattr(running, "run_up", run_up)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    return found


def test_each_half_gets_its_flags(started: dict[str, Any]) -> None:
    flags = ["--model", "owner/model", "--host", "192.168.1.10", "--quant", "int4", "--port", "0", "--no-live-line"]
    args = parse_args(["up", *flags, "--initial-peers", PEER, PEER, "--swarm", "mine", "--memory", "4GiB"])
    up_command(args)()
    both = ["--model=owner/model", "--initial-peers", PEER, PEER, "--swarm=mine", "--log-level=warning"]
    both.append("--log-format=text")
    own = ["--quant=int4", "--memory=4GiB", "--host=192.168.1.10", "--no-live-line"]
    assert started["server"] == [sys.executable, "-m", "swarm_server", *both, *own]
    assert started["gateway"] == [sys.executable, "-m", "swarm_client", "serve", *both, "--port=0"]
    assert started["opens"]


def test_the_console_script_starts_itself(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/swarm/bin/swarm", "up"])
    up_command(parse_args(["up", "--port", "0", "--no-browser"]))()
    assert started["server"][:2] == ["/opt/swarm/bin/swarm", "server"]
    assert started["gateway"][:2] == ["/opt/swarm/bin/swarm", "serve"]
    assert not started["opens"]
