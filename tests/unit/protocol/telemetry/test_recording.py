"""Spans: who is whose child, what goes to other processes, and what an error tells."""

from __future__ import annotations

import pytest

from swarm_protocol.telemetry.tracing import tracing
from tests.unit.recorded import PARENT_ID, TRACE_ID, TRACEPARENT, parent_id, recorded, span_id, trace_id

CALLER = [("user-agent", "grpc"), ("traceparent", TRACEPARENT), ("tracestate", "vendor=secret"), ("key-bin", b"\xff")]


def test_a_call_continues_the_callers_trace_and_goes_on_to_others() -> None:
    with recorded() as found, tracing().call("call", {"a": 1}, CALLER):
        tracing().begin("phase").end()
        with tracing().span("work"):
            tracing().event("happened", {"b": ("x", "y")})
            headers = tracing().headers()
    call, phase, work = found.spans
    assert [span.name for span in found.spans] == ["call", "phase", "work"]
    assert trace_id(call) == trace_id(work) == TRACE_ID and parent_id(call) == PARENT_ID
    assert parent_id(phase) == parent_id(work) == span_id(call)
    assert headers == [("traceparent", f"00-{TRACE_ID}-{span_id(work)}-01")]
    (event,) = work.events
    assert (event.name, dict(event.attributes or {})) == ("happened", {"b": ("x", "y")})
    assert dict(call.attributes or {}) == {"a": 1} and call.kind.name == "SERVER"


@pytest.mark.parametrize("headers", [[], [("traceparent", "00-0-0-01")], [("traceparent", f"00-{'0' * 32}-1-01")]])
def test_a_call_outside_traces_leaves_none(headers: list[tuple[str, str]]) -> None:
    with recorded() as found, tracing().call("call", {}, headers) as span:
        span.set_attributes({"a": 1})
        assert not tracing().headers()
        tracing().event("happened", {})
    assert found.spans == []


def test_a_trace_that_is_not_sampled_is_not_recorded_and_said_so_to_others() -> None:
    with recorded() as found, tracing().call("call", {}, [("traceparent", TRACEPARENT[:-1] + "0")]):
        ((_, header),) = tracing().headers()
        assert header.startswith(f"00-{TRACE_ID}-") and header.endswith("-00")
    assert found.spans == []


def test_an_error_has_a_type_and_no_text() -> None:
    with recorded() as found, pytest.raises(ValueError), tracing().span("work"):
        raise ValueError("what a user wrote")
    (work,) = found.spans
    assert dict(work.attributes or {}) == {"error.type": "ValueError"}
    assert work.status.status_code.name == "ERROR" and work.status.description is None and not work.events


def test_nothing_is_recorded_after_the_end() -> None:
    with recorded() as found:
        pass
    with tracing().span("late") as span:
        span.set_attributes({})
        assert tracing().headers() == ()
    assert found.spans == []
