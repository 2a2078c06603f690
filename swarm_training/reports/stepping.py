"""The moments at which the numbers of a run are reported: once for each global step."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from swarm_protocol.failures import undone_on_error
from swarm_training.contract.views import RunView
from swarm_training.reports.reporter import OpenReporter, RunReporter
from swarm_training.reports.scalars import scalars_of

SETTLED_S = 30.0  # peers put their records on the DHT every 15 s: by then, all of a step's have come
_logger = logging.getLogger(__name__)


class StepReports:
    """The reports of one run, step by step. A reporter that fails gets no more numbers, and the run goes on."""

    def __init__(self, reporters: Iterable[RunReporter]) -> None:
        self._reporters = list(reporters)
        self._seen: RunView | None = None  # the newest view, if it has not been reported
        self._moment = (-1, -1)
        self._since_s = 0.0

    def see(self, view: RunView, now_s: float) -> None:
        """Take a view from outside. Its step is reported when the run has gone on, or ``SETTLED_S`` after it was seen
        first, since the records of a step's peers arrive one after the other. ``now_s``: of any steady clock."""
        moment = view.rollbacks, view.step
        if moment != self._moment:
            self._report_seen()
            self._moment, self._since_s = moment, now_s
            self._seen = view
        elif self._seen is not None:
            self._seen = view
        if now_s - self._since_s >= SETTLED_S:
            self._report_seen()

    def report(self, view: RunView) -> None:
        """Report a view now."""
        scalars = scalars_of(view)
        for reporter in list(self._reporters):
            try:
                reporter.add(view.step, scalars)
            except OSError as error:
                _logger.warning("reports end at step %d, because they cannot be written: %s", view.step, error)
                self._reporters.remove(reporter)

    def close(self) -> None:
        """Report the last view, and close all places."""
        self._report_seen()
        for reporter in self._reporters:
            try:
                reporter.close()
            except OSError as error:
                _logger.warning("the last reports cannot be written: %s", error)

    def _report_seen(self) -> None:
        seen, self._seen = self._seen, None
        if seen is not None and seen.peers:
            self.report(seen)


def open_reports(targets: Iterable[OpenReporter], run: str) -> StepReports:
    """Open the places for a run of this name. Raises ValueError if one of them cannot be opened; the others are closed
    then."""
    opened: list[RunReporter] = []
    with undone_on_error(lambda: StepReports(opened).close()):
        for target in targets:
            opened.append(target(run))
    return StepReports(opened)
