"""Lanes of a batch: as many, and on such chains, as get a step through soonest."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.routing.pipelining import PipelineStage, chains_of_lanes, divided, most_lanes, step_s
from swarm_client.routing.routing import Costs, Route
from swarm_protocol.dht.records import ServerRecord, SwarmView
from swarm_protocol.errors import NoRoute
from swarm_protocol.span import Span
from tests.unit.support import server_record

ALL = Span(0, 8)
NEAR = Costs({})
CPU = {"tokens_per_s": 100.0, "forward_tokens_per_s": 500.0}  # 2 ms for a row, beside the 8 ms of any step
GPU = {"tokens_per_s": 100.0, "forward_tokens_per_s": 100_000.0}  # which reads its weights, whatever the rows are
SECONDS = st.floats(0.0, 1.0)
STAGES = st.lists(st.builds(PipelineStage, SECONDS, SECONDS), min_size=1, max_size=5)


def pipeline_s(stages: list[PipelineStage], num_rows: int, number: int) -> float:
    """Lane by lane: each begins at a stage once the stage has done the one before, and it has left the last stage."""
    free_s = [0.0] * len(stages)
    for _ in range(number):
        there_s = 0.0
        for index, stage in enumerate(stages):
            there_s = free_s[index] = max(there_s, free_s[index]) + stage.seconds(num_rows)
    return free_s[-1]


@given(STAGES, st.integers(1, 100), st.integers(1, 8))
def test_equal_lanes_on_one_chain_take_what_a_pipeline_takes(stages, num_rows, number) -> None:
    lanes = [{str(index): stage for index, stage in enumerate(stages)}] * number
    assert step_s(lanes, [num_rows] * number) == pytest.approx(pipeline_s(stages, num_rows, number))


def no_links(_route: Route) -> dict[str, PipelineStage]:
    return {}


def lanes(*servers: ServerRecord, rows: int = 128, unit: int = 1, links=no_links) -> list[list[str]]:
    """The servers of each lane."""
    chains = chains_of_lanes(SwarmView(servers), ALL, rows, unit, NEAR, links)
    return [[hop.server.peer_id for hop in chain] for chain in chains]


def chain(number: int, **speeds: float) -> list[ServerRecord]:
    size = len(ALL) // number
    return [server_record(f"s{index}", f"{index * size}:{index * size + size}", **speeds) for index in range(number)]


def test_many_rows_keep_all_servers_of_a_chain_busy() -> None:
    two, four = lanes(*chain(2, **CPU)), lanes(*chain(4, **CPU))
    assert two == [["s0", "s1"]] * len(two) and len(four) > len(two) > 1


@pytest.mark.parametrize(
    "servers",
    [chain(1, **GPU), chain(2, **GPU), chain(1, **CPU), chain(2, tokens_per_s=10.0)],
    ids=["one-gpu", "rows-cost-nothing", "nobody-to-compute-beside", "it-is-not-known-how-fast-many-rows-are"],
)
def test_where_lanes_gain_nothing_rows_stay_together(servers: list[ServerRecord]) -> None:
    assert lanes(*servers) == [[server.peer_id for server in servers]]


def test_few_rows_stay_together() -> None:
    servers = chain(4, **CPU)
    assert len(lanes(*servers, rows=31)) == 1 < len(lanes(*servers, rows=32))


def test_replicas_share_the_rows() -> None:
    equal = lanes(server_record("a", "0:8", **CPU), server_record("b", "0:8", **CPU))
    assert Counter(name for (name,) in equal) == {"a": len(equal) // 2, "b": len(equal) // 2} and len(equal) > 1
    for times_slower, helps in ((2, True), (4, False)):
        slow = {name: speed / times_slower for name, speed in CPU.items()}
        found = lanes(server_record("a", "0:8", **CPU), server_record("b", "0:8", **slow))
        counts = Counter(name for (name,) in found)
        assert counts["a"] > counts["b"] > 0 if helps else counts == {"a": 1}


def test_a_slow_link_is_a_stage_too() -> None:
    def links(route: Route) -> dict[str, PipelineStage]:
        return {"to the swarm": PipelineStage(0.0, 0.002), "from the swarm": PipelineStage(0.0, 0.002)}

    assert len(lanes(*chain(1, **CPU), links=links)) > 1


def test_beams_of_a_text_stay_together() -> None:
    assert len(lanes(*chain(2, **CPU), rows=64, unit=64)) == 1 < len(lanes(*chain(2, **CPU), rows=64, unit=4))
    assert divided(40, 4, unit=4) == [slice(0, 8), slice(8, 20), slice(20, 28), slice(28, 40)]


@given(st.integers(1, 300), st.integers(1, 12))
def test_every_row_is_in_one_lane(num_rows, unit) -> None:
    for number in range(1, most_lanes(num_rows, unit) + 1):
        parts = divided(num_rows, number, unit)
        assert len(parts) == number and all(part.start < part.stop for part in parts)
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
        assert all(part.start % unit == 0 for part in parts)


def test_blocks_that_nobody_holds_are_named() -> None:
    with pytest.raises(NoRoute, match="4:8"):
        lanes(*chain(2, **CPU)[:1])
