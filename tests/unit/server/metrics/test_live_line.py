"""The line that a server shows on its terminal: in place, below the log lines, and only where somebody sees it."""

from __future__ import annotations

import asyncio
import fcntl
import io
import logging
import os
import pty
import struct
import termios
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_protocol.dht.records import ServerState, WorkTotals
from swarm_server.metrics import live_line
from swarm_server.metrics.live_line import LiveLine, WorkRate, has_live_line, keep_live_line, work_text
from tests.unit.support import server_record


class Screen(io.StringIO):
    """A terminal that understands what erases a line."""

    @property
    def rows(self) -> list[str]:
        rows = [""]
        for part in self.getvalue().replace("\r\x1b[K", "\0").replace("\n", "\n\1").split("\1"):
            for number, written in enumerate(part.split("\0")):
                rows[-1] = ("" if number else rows[-1]) + written
            if part.endswith("\n"):
                rows[-1] = rows[-1].removesuffix("\n")
                rows.append("")
        return rows


@pytest.fixture
def logger() -> Any:
    """A logger that writes to a screen, as a command's root logger writes to stderr."""
    screen, before = Screen(), logging.root.handlers[:]
    handler = logging.StreamHandler(screen)
    logging.root.handlers[:] = [handler]
    yield SimpleNamespace(screen=screen, handler=handler, say=logging.getLogger("some.module").warning)
    logging.root.handlers[:] = before


def test_the_line_is_rewritten_below_the_log_lines(logger: Any) -> None:
    logger.say("before")
    with LiveLine(logger.screen, lambda: True) as line:
        line.show("a long first text")
        line.show("second")
        assert logger.screen.rows == ["before", "second"]
        logger.say("a log line that is longer than the line")
        logger.say("x")
        assert logger.screen.rows == ["before", "a log line that is longer than the line", "x", "second"]
        line.show("third")
    assert logger.screen.rows == ["before", "a log line that is longer than the line", "x", ""]
    logger.say("after")
    assert logger.screen.rows[-2:] == ["after", ""] and logger.handler.stream is logger.screen


def test_without_a_text_the_terminal_is_left_alone(logger: Any) -> None:
    with LiveLine(logger.screen, lambda: True) as line:
        line.show("")
        logger.say("a log line")
        assert logger.screen.getvalue() == "a log line\n"
        line.show("a text")
        line.show("")
        assert logger.screen.rows == ["a log line", ""]


def test_nothing_is_written_into_the_prompt_of_a_shell(logger: Any) -> None:
    has_terminal = True
    with LiveLine(logger.screen, lambda: has_terminal) as line:
        line.show("in the foreground")
        has_terminal = False
        written = logger.screen.getvalue()
        line.show("in the background")
        assert logger.screen.getvalue() == written
        logger.say("a log line")
        assert logger.screen.getvalue() == written + "a log line\n"
        has_terminal = True
        line.show("in the foreground again")
        assert logger.screen.rows[-1] == "in the foreground again"


def test_other_handlers_keep_their_streams(logger: Any) -> None:
    elsewhere = Screen()
    logging.root.addHandler(logging.StreamHandler(elsewhere))
    with LiveLine(logger.screen, lambda: True) as line:
        line.show("the line")
        logger.say("a log line")
    assert elsewhere.getvalue() == "a log line\n"


def test_a_narrow_terminal_shows_the_beginning() -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(terminal, "w") as stream, os.fdopen(controller, "rb", buffering=0) as shown:
        LiveLine(stream, lambda: True).show("0123456789" * 3)
        assert shown.read(100) == b"\r\x1b[K0123456789012345678"  # a full row would make the terminal begin another


def test_the_text_says_what_the_server_does() -> None:
    record = server_record(blocks="2:6", work=WorkTotals(8_000, 1_800, 72, 60.0))
    assert (
        work_text(record, 2, 12.34)
        == "online · blocks 2:6 of 8 · 12.3 tokens/s · 2 sessions · 1,234 tokens contributed"
    )
    draining = work_text(replace(record, state=ServerState.DRAINING), 1, 0.0)
    assert draining.startswith("draining · blocks 2:6 of 8 · 0.0 tokens/s · 1 session · ")


def test_the_speed_is_that_of_the_last_seconds() -> None:
    rate = WorkRate()
    assert rate.update(WorkTotals(0, 0, 0, 10.0), 8) == 0
    assert rate.update(WorkTotals(80, 0, 0, 11.0), 8) == 10  # positions × blocks, in a model of 8 blocks
    assert rate.update(WorkTotals(80, 40, 40, 12.0), 8) == 10
    for uptime_s in (13.0, 14.0, 15.0, 16.0):
        after = rate.update(WorkTotals(80, 40, 40, uptime_s), 8)
    assert after == 0


async def test_it_is_kept_up_to_date_and_free_while_no_blocks_are_hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_line, "_REFRESH_S", 0.0)
    texts: list[str] = []
    asked = threading.Event()
    hosted: list[Any] = [SimpleNamespace(num_sessions=3), None]

    class Line(LiveLine):
        def show(self, text: str) -> None:
            texts.append(text)
            if len(texts) == 2:
                asked.set()

    record = server_record(work=WorkTotals(800, 0, 0, 1.0))
    task = asyncio.ensure_future(keep_live_line(Line(Screen()), lambda: record, lambda: hosted[len(texts) > 0]))
    await asyncio.to_thread(asked.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert texts[:2] == [work_text(server_record(work=WorkTotals(800, 0, 0, 1.0)), 3, 0.0), ""]


@pytest.mark.parametrize(
    ("term", "is_terminal", "is_off", "expected"),
    [
        ("xterm-256color", True, False, True),
        ("xterm-256color", False, False, False),
        ("xterm-256color", True, True, False),
        ("dumb", True, False, False),
    ],
)
def test_it_is_for_terminals_whose_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, term: str, is_terminal: bool, is_off: bool, expected: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: is_terminal))
    assert has_live_line(is_off=is_off) is expected
