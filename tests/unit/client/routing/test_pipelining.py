"""Parts of a batch: as many as get a step through soonest, by the time that a pipeline takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.routing.pipelining import Stage, divided, most_parts, num_parts, servers_of, step_s
from swarm_client.routing.routing import Costs, Hop
from swarm_protocol.span import Span
from tests.unit.support import server_record

CPU = Stage(0.010, 0.002)  # many rows take nearly as much longer as they are more
GPU = Stage(0.010, 0.00001)  # which reads its weights, whatever the rows are
SECONDS = st.floats(0.0, 1.0)
STAGES = st.lists(st.builds(Stage, SECONDS, SECONDS), min_size=1, max_size=5)


def pipeline_s(stages: list[Stage], num_rows: int, number: int) -> float:
    """Part by part: each begins at a stage once the stage has done the one before, and it has left the last stage."""
    free_s = [0.0] * len(stages)
    for _ in range(number):
        there_s = 0.0
        for index, stage in enumerate(stages):
            there_s = free_s[index] = max(there_s, free_s[index]) + stage.seconds(num_rows / number)
    return free_s[-1]


@given(STAGES, st.integers(1, 300), st.integers(1, 8))
def test_a_step_takes_what_a_pipeline_takes(stages, num_rows, number) -> None:
    assert step_s(stages, num_rows, number) == pytest.approx(pipeline_s(stages, num_rows, number))


@given(STAGES, st.integers(1, 300), st.integers(1, 8))
def test_no_other_number_is_much_better(stages, num_rows, unit) -> None:
    best = num_parts(stages, [], num_rows, unit)
    least_s = min(pipeline_s(stages, num_rows, number) for number in range(1, most_parts(num_rows, unit) + 1))
    assert pipeline_s(stages, num_rows, best) <= least_s / 0.9 + 1e-9


def test_many_rows_keep_all_servers_busy() -> None:
    assert num_parts([CPU, CPU], [], 128) > 1
    assert num_parts([CPU] * 4, [], 128) > num_parts([CPU, CPU], [], 128)


@pytest.mark.parametrize("servers", [[GPU, GPU], [CPU], []], ids=["rows cost nothing", "one server", "unknown"])
def test_otherwise_they_stay_together(servers) -> None:
    assert num_parts(servers, [], 128) == 1


def test_few_rows_stay_together() -> None:
    assert num_parts([CPU] * 4, [], 31) == 1 < num_parts([CPU] * 4, [], 32)


def test_a_slow_link_is_a_stage_too() -> None:
    assert num_parts([CPU], [Stage(0.0, 0.002)] * 2, 128) > 1 == num_parts([CPU], [Stage(0.0, 0.0)] * 2, 128)


def test_beams_of_a_text_stay_together() -> None:
    assert num_parts([CPU, CPU], [], 64, unit=64) == 1
    assert divided(40, 4, unit=4) == [slice(0, 8), slice(8, 20), slice(20, 28), slice(28, 40)]


@given(st.integers(1, 300), st.integers(1, 12))
def test_every_row_is_in_one_part(num_rows, unit) -> None:
    for number in range(1, most_parts(num_rows, unit) + 1):
        parts = divided(num_rows, number, unit)
        assert len(parts) == number and all(part.start < part.stop for part in parts)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
        assert all(part.start % unit == 0 for part in parts)


def test_servers_say_what_a_step_and_its_rows_take() -> None:
    """Two of four blocks: 10 tokens/s is 50 ms, and each further row 1 ms."""
    record = server_record("a", "0:4", tokens_per_s=10.0, forward_tokens_per_s=500.0)
    (stage,) = servers_of((Hop(record, Span(0, 2)),), Costs({}))
    assert stage.seconds(1) == pytest.approx(0.050, abs=0.005) and stage.row_s == pytest.approx(0.001)
    silent = server_record("b", "2:4", tokens_per_s=10.0)
    assert servers_of((Hop(record, Span(0, 2)), Hop(silent, Span(2, 4))), Costs({})) == []
