"""Tests wait for conditions, never for a fixed time."""

from __future__ import annotations

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
