"""Steps of one message that are computed without a task for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from swarm_protocol.failures import outcome_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode_rows
from swarm_server.admission.preemption import now_s
from swarm_server.engine.scheduler import Scheduler
from swarm_server.engine.session_state import NextPositions, Results, SessionStep
from swarm_server.net.arrivals import Arrivals
from swarm_server.sessions.sessions import HostedSession, Result, StepKind
from swarm_server.sessions.step_outputs import StepOutputs

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class BundledStep:
    """A step that came in a bundle.

    Attributes:
        arrivals: the memory in which the step counts until it ends, with ``size_bytes``.
        done: called at the end with False if the step was refused, else with True.
    """

    hosted: HostedSession
    request: pb.Step
    arrivals: Arrivals
    size_bytes: int
    done: Callable[[bool], None]


class StepGroup:
    """Steps of several sessions that begin together.

    Those that are the next positions of text are decoded, computed and encoded together: for one step alone, each of
    these calls takes about as long as for many.
    """

    def __init__(self, on_end: Callable[[Sequence[BundledStep], Result], None]) -> None:
        """Create an empty group; ``on_end`` gets steps that have ended, and their result."""
        self._on_end = on_end
        self._next: dict[StepKind, list[BundledStep]] = {}
        self._others: list[tuple[BundledStep, SessionStep]] = []

    def begin(self, step: BundledStep) -> bool:
        """Begin a step. Return False, and change nothing, if it needs a task, see ``HostedSession.begin``."""
        try:
            begun = step.hosted.begin(step.request, self._next)
        except Exception:  # a task meets the same error and sends it to the client
            _logger.debug("a step takes a task", exc_info=True)
            return False
        if begun is None:
            return False
        if isinstance(begun, SessionStep):
            self._others.append((step, begun))
        elif (alike := self._next.get(begun)) is not None:
            alike.append(step)
        else:
            self._next[begun] = [step]
        return True

    def submit(self) -> list[BundledStep]:
        """Submit the steps that have begun. Return those that need tasks after all; their sessions are idle again."""
        left: list[BundledStep] = []
        for steps in self._next.values():
            left += _tried(steps, partial(self._start_next, steps[0].hosted.scheduler, steps))
        for step, session_step in self._others:
            left += _tried([step], partial(self._start_other, step.hosted.scheduler, step, session_step))
        return left

    def _start_next(self, scheduler: Scheduler, steps: Sequence[BundledStep]) -> None:
        requests, hosted = [step.request for step in steps], [step.hosted for step in steps]
        positions = NextPositions(
            [each.session for each in hosted],
            [request.start_position for request in requests],
            decode_rows([request.hidden for request in requests]),
        )
        deliver, is_background = partial(self._deliver, scheduler), hosted[0].is_background
        scheduler.start_next(positions, steps, [each.names for each in hosted], deliver, is_background=is_background)

    def _start_other(self, scheduler: Scheduler, step: BundledStep, session_step: SessionStep) -> None:
        hosted, deliver = step.hosted, partial(self._deliver, scheduler, [step])
        scheduler.start(hosted.session, session_step, deliver, *hosted.names, is_background=hosted.is_background)

    def _deliver(self, scheduler: Scheduler, steps: Sequence[BundledStep], results: Results) -> None:
        """End the steps. ``results``: a list with one result for each step, or one result for all steps."""
        if isinstance(results, list):
            for step, result in zip(steps, results, strict=True):
                self._deliver(scheduler, [step], result)
            return
        outputs = results if isinstance(results, Exception) else StepOutputs(results, len(steps), scheduler)
        time_s = now_s()
        ended = []
        for number, step in enumerate(steps):
            try:
                if step.hosted.end(step.request, outputs, number, time_s):
                    ended.append(step)
                else:
                    output = outputs if isinstance(outputs, Exception) else outputs.of(number)
                    step.hosted.end_later(step.request, output, partial(self._on_end, [step]))
            except Exception as error:  # the other steps end as they would without this one
                self._on_end([step], error)
        if ended:
            self._on_end(ended, True)


def _tried(steps: list[BundledStep], start: Callable[[], None]) -> list[BundledStep]:
    """Call ``start``. If it fails, make the sessions of these steps idle again, and return the steps."""
    error = outcome_of(start)
    if error is None:
        return []
    _logger.debug("steps take tasks", exc_info=error)  # which meet the same error and send it to the client
    for step in steps:
        step.hosted.undo_begin()
    return steps
