"""``swarm serve`` as it is typed: what is refused, and that it says where it listens."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from swarm_cli.command_line import main, parse_args
from swarm_cli.commands.serve import serve_command
from swarm_gateway.app.serving import listen, run
from tests.unit.support import refusal


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    return refusal(capsys, lambda: main(["serve", *flags]))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.10", "::", "example.org"])
def test_other_machines_need_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str) -> None:
    assert "--api-keys" in refused(capsys, "--host", host)
    keys = tmp_path / "keys"
    keys.write_text("sk-ada\n")
    serve_command(parse_args(["serve", "--host", host, "--api-keys", str(keys)]))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_this_machine_needs_none(host: str) -> None:
    serve_command(parse_args(["serve", "--host", host]))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--port", "70000"), "--port is 70000"),
        (("--workers", "0"), "--workers is 0: expected at least 1"),
        (("--max-active", "0"), "--max-active is 0"),
        (("--max-queued", "-1"), "--max-queued is -1"),
        (("--requests-per-minute", "0"), "--requests-per-minute is 0"),
        (("--api-keys", "nowhere"), "nowhere cannot be read"),
        (("--model", "./nowhere"), "./nowhere does not exist"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(capsys, *flags)


def test_missing_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'swarm-lm[serve]'" in refused(capsys)


def test_a_port_in_use() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ValueError, match="is in use") as refusal:
        listen("127.0.0.1", taken.getsockname()[1])
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match="cannot listen on port 1 of 192"):
        listen("192.0.2.1", 1)  # of no machine: RFC 5737


def test_a_gateway_in_the_background_of_a_shell_does_not_hear_ctrl_c() -> None:
    def handler_while_serving(before: signal.Handlers) -> object:
        signal.signal(signal.SIGINT, before)
        found: list[object] = []

        @contextlib.asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            found.append(signal.getsignal(signal.SIGINT))
            signal.raise_signal(signal.SIGTERM)
            yield

        with listen("127.0.0.1", 0) as listener, pytest.raises(SystemExit):
            run(FastAPI(lifespan=lifespan), listener, [])
        return found[0]

    assert handler_while_serving(signal.SIG_IGN) is signal.SIG_IGN
    assert handler_while_serving(signal.SIG_DFL) not in (signal.SIG_IGN, signal.SIG_DFL)
