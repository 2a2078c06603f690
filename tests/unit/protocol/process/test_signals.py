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
