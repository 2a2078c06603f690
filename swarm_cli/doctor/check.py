"""Checks, their findings, and their execution with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from swarm_protocol.failures import first_line, outcome_of


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """A result of a check: ``subject`` is the thing that was checked, and ``found`` is its state.

    ``to_do`` is a remedy; it is empty if nothing is wrong.
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
class DoctorCheck:
    """A check of one subject. ``run`` may take ``timeout_s``, and may raise any exception."""

    subject: str
    run: Callable[[], Iterable[Finding]]
    timeout_s: float = 15.0


def findings_of(checks: Iterable[DoctorCheck]) -> Iterator[Finding]:
    """Run one check after the other, and yield their findings. A check that hangs or fails gives a finding too."""
    for check in checks:
        yield from _findings(check)


def _findings(check: DoctorCheck) -> list[Finding]:
    """Run the check in a thread of its own, because nothing ends a call that hangs, and return its findings."""
    results: queue.Queue[list[Finding]] = queue.Queue()

    def run() -> None:
        found = outcome_of(lambda: list(check.run()))  # a machine may be broken in any way
        if isinstance(found, Exception):
            found = [failed(check.subject, f"cannot be checked: {first_line(found)}", "see --log-level debug")]
        results.put(found)

    threading.Thread(target=run, name=check.subject, daemon=True).start()
    try:
        return results.get(timeout=check.timeout_s)
    except queue.Empty:
        found = f"nothing was found out within {check.timeout_s:g} s"
        return [failed(check.subject, found, "something hangs there: see --log-level debug")]
