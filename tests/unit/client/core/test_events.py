"""What a session counts of what happens to it."""

from __future__ import annotations

import pytest

from swarm_client.core.events import DoubtfulTokens, Move, PartReporter, Recovery, Reporter, Retry, Waiting
from swarm_protocol.span import Span
from swarm_protocol.telemetry.tracing import tracing


def recovery(stall_s: float) -> Recovery:
    return Recovery(Span(0, 2), ("failed",), "it is gone", ("another",), 3, False, stall_s)


@pytest.mark.parametrize(
    ("stalls", "expected_s"),
    [
        ([(2.0, 1.0), (5.0, 2.0)], 3.0),  # one after the other
        ([(5.0, 2.0), (5.0, 2.0), (5.0, 0.0)], 2.0),  # at the same time
        ([(5.0, 2.0), (6.0, 2.0)], 3.0),  # the second begins within the first
        ([(2.0, 1.0), (4.0, 1.0), (6.0, 5.5)], 5.5),  # the last began before both
        ([(2.0, 1.0), (4.0, 1.0), (6.0, 2.5)], 4.0),  # it began within the second
        ([(2.0, 1.0), (6.0, 5.5), (7.0, 2.0)], 6.5),
    ],
)
def test_what_stands_still_at_the_same_time_counts_once(stalls: list[tuple[float, float]], expected_s: float) -> None:
    clock, events = [0.0], []
    reporter = Reporter(events.append, clock=lambda: clock[0])
    for end_s, seconds in stalls:
        clock[0] = end_s
        PartReporter(reporter).report(recovery(seconds))
    assert reporter.stats.stall_s == pytest.approx(expected_s)
    assert (reporter.stats.recoveries, reporter.stats.replayed_tokens) == (len(stalls), 3 * len(stalls))
    assert [event.stall_s for event in events] == [seconds for _, seconds in stalls]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0, "0"), (0.042, "0.042"), (0.84, "0.84"), (9.96, "10"), (99.7, "100"), (1234.5, "1234")]
)
def test_seconds_are_said_without_an_exponent(seconds: float, said: str) -> None:
    events = (recovery(seconds), Move(Span(0, 2), "a", "b", 3, seconds), Waiting("no server", seconds))
    assert all(str(event).endswith(f" {said} s") for event in events)


@pytest.mark.parametrize(("span", "said"), [(Span(0, 2), "blocks 0:2 are"), (None, "the pass is")])
def test_a_retry_says_what_is_computed_again(span: Span | None, said: str) -> None:
    assert str(Retry(span, "a", "it is gone")) == f"it is gone; {said} computed again"


def test_doubtful_positions_are_named_with_the_last_one_included() -> None:
    assert str(DoubtfulTokens(("liar",), 3, 7)).startswith("positions 3 to 6 are doubtful")


def test_what_happens_is_an_event_of_the_requests_trace() -> None:
    from tests.unit.recorded import recorded

    with recorded() as found, tracing().span("generation"):
        Reporter(clock=lambda: 9.0).report(recovery(0.5))
    (event,) = found.span("generation").events
    assert event.name == "Recovery"
    assert dict(event.attributes or {}) == {
        "swarm.span": "0:2",
        "swarm.failed": ("failed",),
        "swarm.reason": "it is gone",
        "swarm.replacements": ("another",),
        "swarm.replayed_tokens": 3,
        "swarm.from_copy": False,
        "swarm.stall_s": 0.5,
    }
