"""Signals that end a command, also where a signal does not exist or the event loop takes none, as on Windows."""

from __future__ import annotations

import asyncio
import signal

import pytest

from swarm_protocol.process import signals


def test_a_signal_is_heard_where_the_loop_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop(asyncio.SelectorEventLoop):
        def add_signal_handler(self, *_: object) -> None:  # type: ignore[override]
            raise NotImplementedError

    async def scenario() -> signal.Signals:
        heard: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        signals.call_on_signal(signal.SIGTERM, heard.set_result)
        signal.raise_signal(signal.SIGTERM)
        return await asyncio.wait_for(heard, 60)

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(scenario()) is signal.SIGTERM


def test_what_does_not_exist_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if signals.HANGUP is not None:
        assert signals.ending_signals() == [signal.SIGTERM, signals.HANGUP]
    monkeypatch.setattr(signals, "HANGUP", None)
    assert signals.ending_signals() == [signal.SIGTERM]


def test_ctrl_c_ends_no_process_in_the_background_of_a_shell() -> None:
    assert signal.SIGINT in signals.all_ending_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signals.all_ending_signals() == signals.ending_signals()
    signals.exit_on_interrupt()
    signals.unwind_on_signals()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-40, "was killed by signal 40"),  # a real-time signal, which has no name
    ],
)
def test_the_end_of_a_process_in_words(code: int, words: str) -> None:
    assert signals.exit_in_words(code) == words
