"""A line at the bottom of a terminal, below the log lines, that shows what a server does."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from swarm_protocol.dht.records import ServerRecord, WorkTotals
from swarm_protocol.process.logs import ERASE_LINE, is_in_foreground, shows_progress
from swarm_protocol.process.routine import repeat

if TYPE_CHECKING:
    from swarm_server.sessions.host import SessionManager

_REFRESH_S = 1.0
_NUM_READINGS = 5  # the speed is that of the last seconds, because a slow token takes longer than one refresh
_COLUMNS = 80  # of a terminal that does not say how wide it is


class LiveLine:
    """A status line that is rewritten in place. Log lines appear above it while the context is active.

    Nothing is shown while the shell has the terminal, as after ``swarm server &``.
    """

    def __init__(self, stream: TextIO, has_terminal: Callable[[], bool] = is_in_foreground) -> None:
        self._stream = stream
        self._has_terminal = has_terminal
        self._shown = ""
        self._lock = threading.Lock()  # any thread may log
        self._handlers: list[logging.StreamHandler[Any]] = []  # whose lines come through ``write``

    def __enter__(self) -> LiveLine:
        for handler in logging.root.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stream:
                handler.setStream(self)
                self._handlers.append(handler)
        return self

    def __exit__(self, *_exception: object) -> None:
        for handler in self._handlers:
            handler.setStream(self._stream)
        self.show("")

    def show(self, text: str) -> None:
        """Replace the line by as much of the text as fits; remove the line if the text is empty."""
        with self._lock:
            if not self._has_terminal():
                self._shown = ""
            elif text or self._shown:
                self._shown = text[: _columns(self._stream) - 1]
                with suppress(OSError):  # the terminal has been closed
                    self._put(f"{ERASE_LINE}{self._shown}")

    def write(self, text: str) -> int:
        """Write a log line above the line."""
        with self._lock:
            if self._shown and self._has_terminal():
                self._put(f"{ERASE_LINE}{text}{self._shown}")
            else:
                self._shown = ""
                self._put(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing, because everything is flushed when it is written."""

    def _put(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class WorkRate:
    """The speed of a server over the last seconds, read from its own counters."""

    def __init__(self) -> None:
        self._readings: deque[WorkTotals] = deque(maxlen=_NUM_READINGS)

    def update(self, work: WorkTotals, num_blocks: int) -> float:
        """Add the present counters. Return positions through a whole model of ``num_blocks`` blocks per second."""
        self._readings.append(work)
        first = self._readings[0]
        seconds = work.uptime_s - first.uptime_s
        return (work.tokens(num_blocks) - first.tokens(num_blocks)) / seconds if seconds > 0 else 0.0


def work_text(record: ServerRecord, num_sessions: int, tokens_per_s: float) -> str:
    """Return what a server does, in one line. Tokens count as in the monitor: as if whole models had computed them."""
    sessions = "1 session" if num_sessions == 1 else f"{num_sessions} sessions"
    tokens = f"{record.work.tokens(record.num_blocks):,.0f} tokens contributed"
    blocks = f"blocks {record.span} of {record.num_blocks}"
    return " · ".join((record.state.name.lower(), blocks, f"{tokens_per_s:.1f} tokens/s", sessions, tokens))


def has_live_line(*, is_off: bool) -> bool:
    """Return whether there is a line: stderr is a terminal that can erase lines, and the user has not turned it off."""
    return not is_off and shows_progress() and os.environ.get("TERM", "dumb") != "dumb"


async def keep_live_line(
    line: LiveLine, record: Callable[[], ServerRecord], sessions: Callable[[], SessionManager | None]
) -> None:
    """Keep the status line up to date, until cancelled. While no blocks are hosted, progress bars have its place."""
    rate = WorkRate()

    async def refresh() -> None:
        now, hosted = record(), sessions()
        tokens_per_s = rate.update(now.work, now.num_blocks)
        text = "" if hosted is None else work_text(now, hosted.num_sessions, tokens_per_s)
        await asyncio.to_thread(line.show, text)  # a terminal that Ctrl-S has stopped must not stop the server

    with line:
        await repeat(refresh, (_REFRESH_S, _REFRESH_S))


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    except OSError:
        return _COLUMNS
