"""A signal while a turn is typed ends the prompt between two callbacks of its loop, never inside one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from prompt_toolkit.application import create_app_session, get_app
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from swarm_cli.chat.terminal import TerminalReader
from swarm_protocol.process import signals

ENDING = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in [*ENDING, signal.SIGINT]}
    signals.unwind_on_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def reader(monkeypatch, tmp_path) -> Iterator[TerminalReader]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield TerminalReader()


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_does_not_interrupt_what_the_loop_runs(reader: TerminalReader, number: int) -> None:
    went_on = []

    def send() -> None:
        os.kill(os.getpid(), number)
        went_on.append(get_app().is_running)

    def once_it_runs() -> None:
        asyncio.get_running_loop().call_soon(send)

    reader._session.app.pre_run_callables.append(once_it_runs)
    with pytest.raises(SystemExit) as ended:
        reader.read()
    assert went_on == [True] and ended.value.code == 128 + number


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_before_the_loop_runs_ends_the_prompt(reader: TerminalReader, number: int, monkeypatch) -> None:
    prompt = reader._session.prompt

    def late(**options) -> str:
        os.kill(os.getpid(), number)
        return prompt(**options)

    monkeypatch.setattr(reader._session, "prompt", late)
    with pytest.raises(SystemExit) as ended:
        reader.read()
    assert ended.value.code == 128 + number


def test_signals_mean_the_same_after_a_turn(reader: TerminalReader) -> None:
    before = [signal.getsignal(number) for number in ENDING]
    reader._session.app.pre_run_callables.append(
        lambda: asyncio.get_running_loop().call_soon(lambda: get_app().exit(result="a turn"))
    )
    assert reader.read() == "a turn"
    assert [signal.getsignal(number) for number in ENDING] == before
