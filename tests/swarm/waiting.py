"""Tests wait for conditions, never for a fixed time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 240.0  # for anything that must happen; the machine may be busy
POLL_S = 0.02


def wait_for(condition: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The condition's first true value; fails the test if there is none in time."""
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not happen within {deadline_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


def without_waits(stderr: str) -> list[str]:
    """The lines but for those of a server that is too busy to answer for a moment, as on a machine with much to do."""
    waits = (
        r"blocks \d+:\d+ are computed again$",
        r"^no server holds .*; waiting for up to [\d.]+ s$",
        r"^no answer yet from .*; trying again for up to \d+ s$",
    )
    return [line for line in stderr.splitlines() if not re.search("|".join(waits), line)]
