"""A check, what it finds, and running it for no longer than it may take."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """Attributes:
    subject: what was looked at.
    found: how it is.
    to_do: what helps; empty if nothing is wrong.
    """

    subject: str
    grade: Grade
    found: str
    to_do: str = ""


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, Grade.OK, found)


def warning(subject: str, found: str, to_do: str) -> Finding:
    return Finding(subject, Grade.WARNING, found, to_do)


def failed(subject: str, found: str, to_do: str) -> Finding:
    return Finding(subject, Grade.FAILED, found, to_do)


@dataclass(frozen=True)
class Check:
    """``run`` may take ``timeout_s`` and may raise anything."""

    subject: str
    run: Callable[[], Iterable[Finding]]
    timeout_s: float = 15.0


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """One check after the other; one that hangs or fails is a finding too."""
    for check in checks:
        yield from _findings(check)


def _findings(check: Check) -> list[Finding]:
    results: queue.Queue[list[Finding]] = queue.Queue()

    def run() -> None:
        try:
            results.put(list(check.run()))
        except Exception as error:  # a machine may be broken in any way
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            results.put([failed(check.subject, f"cannot be checked: {reason}", "see --log-level debug")])

    threading.Thread(target=run, name=check.subject, daemon=True).start()
    try:
        return results.get(timeout=check.timeout_s)
    except queue.Empty:
        found = f"nothing was found out within {check.timeout_s:g} s"
        return [failed(check.subject, found, "something hangs there: see --log-level debug")]
