"""The facts that several views of a run show together: its speed over time, and what has happened in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from swarm_protocol.dht.records import short_id
from swarm_training.contract.views import EventView, RunView

_WINDOW_S = 1800.0
_MOST_EVENTS = 30


class RunObserver:
    """The observer of one run, which completes each view with what earlier views and the run file say.

    The share of time in which peers compute is an estimate. It is the time that all peers need for the samples that
    came, at the speed that they report, divided by the time that has passed. It is known once a step has been seen from
    its beginning to its end. Samples beyond the target of a batch do not count, so the share may be too low.
    """

    def __init__(self, rate: Callable[[int], float], checkpoint_every: int) -> None:
        """Observe a run. ``rate``: the learning rate by the number of steps before."""
        self._rate = rate
        self._checkpoint_every = checkpoint_every
        self._before: RunView | None = None
        self._spans: deque[tuple[float, float]] = deque()  # between two steps: seconds passed, seconds computed
        self._stepped_s: float | None = None  # when a step was seen to begin
        self._events: deque[EventView] = deque(maxlen=_MOST_EVENTS)

    def complete(self, view: RunView, now: float) -> RunView:
        """Return the view with all that is known. ``now``: Unix time in seconds, which grows from call to call."""
        newest = view.step - view.step % self._checkpoint_every
        view = replace(view, learning_rate=self._rate(max(view.step - 1, 0)), checkpoint=newest or None)
        if self._before is not None:
            self._measure(self._before, view, now)
            self._events += (EventView(now, text) for text in changes(self._before, view))
        self._before = view
        return replace(view, computing=self._computing(), events=tuple(self._events))

    def _measure(self, before: RunView, after: RunView, now: float) -> None:
        if after.rollbacks != before.rollbacks or after.step < before.step:
            self._spans.clear()
            self._stepped_s = None
        elif after.step > before.step:
            samples = (after.step - before.step) * after.target_batch_size
            if self._stepped_s is not None and after.samples_per_s:
                self._spans.append((now - self._stepped_s, samples / after.samples_per_s))
            self._stepped_s = now
        while len(self._spans) > 1 and sum(passed for passed, _ in self._spans) > _WINDOW_S:
            self._spans.popleft()

    def _computing(self) -> float | None:
        passed_s = sum(passed for passed, _ in self._spans)
        return min(1.0, sum(computed for _, computed in self._spans) / passed_s) if passed_s else None


def changes(before: RunView, after: RunView) -> Iterator[str]:
    """Yield a sentence for each event between two views."""
    known, present = ({peer.peer_id for peer in view.peers} for view in (before, after))
    yield from (f"{short_id(peer_id)} joined" for peer_id in sorted(present - known))
    banned = {ban.peer_id: ban.reason for ban in after.bans}
    for peer_id in sorted(banned.keys() - {ban.peer_id for ban in before.bans}):
        yield f"{short_id(peer_id)} was banned"
    yield from (f"{short_id(peer_id)} left" for peer_id in sorted(known - present - banned.keys()))
    if after.rollbacks > before.rollbacks:
        yield f"the run went back to step {after.step}"
    elif after.checkpoint is not None and after.checkpoint != before.checkpoint:
        yield f"checkpoint of step {after.checkpoint}"
