"""Placement: a server goes where the swarm is weakest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.records import ServerState, SwarmView
from swarm_protocol.span import Span
from swarm_server.placement import choose_span
from tests.unit.support import server_record


def swarm(*servers: tuple[str, float], num_blocks: int = 8) -> SwarmView:
    return SwarmView(
        tuple(
            server_record(str(index), blocks, tokens_per_s=speed, num_blocks=num_blocks)
            for index, (blocks, speed) in enumerate(servers)
        )
    )


@pytest.mark.parametrize(
    ("servers", "num_hosted", "expected"),
    [
        ([], 3, "0:3"),  # the first of equals
        ([], 8, "0:8"),
        ([], 100, "0:8"),  # never more than the model has
        ([("0:4", 10)], 4, "4:8"),
        ([("4:8", 10)], 4, "0:4"),
        ([("0:3", 10), ("5:8", 10)], 2, "3:5"),  # fills the gap
        ([("0:3", 10), ("5:8", 10)], 4, "1:5"),  # the gap first; either side of it is as weak
        ([("0:4", 1), ("4:8", 2)], 4, "0:4"),  # helps the slower half
        ([("0:4", 1), ("0:4", 1), ("4:8", 1.5)], 4, "4:8"),  # two slow servers are faster than one
        ([("0:7", 100)], 1, "7:8"),
        ([("1:2", 100), ("2:8", 40)], 2, "0:2"),  # the weakest block decides, not the sum
        ([("0:8", 5)], 8, "0:8"),
    ],
)
def test_by_example(servers: list[tuple[str, float]], num_hosted: int, expected: str) -> None:
    assert choose_span(swarm(*servers), 8, num_hosted) == Span.parse(expected)


def test_a_server_that_has_not_measured_itself_still_counts() -> None:
    assert choose_span(swarm(("0:4", 0.0)), 8, 4) == Span(4, 8)


def test_a_server_that_is_still_loading_counts() -> None:
    joining = server_record("a", "0:4", state=ServerState.JOINING)
    assert choose_span(SwarmView((joining,)), 8, 4) == Span(4, 8)


def test_a_server_that_leaves_does_not_count() -> None:
    leaving = server_record("a", "0:4", state=ServerState.DRAINING)
    assert choose_span(SwarmView((leaving, server_record("b", "4:8"))), 8, 4) == Span(0, 4)


def test_servers_that_join_one_after_the_other_cover_the_model() -> None:
    servers: list = []
    for _ in range(4):
        span = choose_span(swarm(*servers), 8, 2)
        servers.append((str(span), 10.0))
    assert sorted(blocks for blocks, _ in servers) == ["0:2", "2:4", "4:6", "6:8"]


@given(
    num_blocks=st.integers(1, 8),
    num_hosted=st.integers(1, 10),
    servers=st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 8), st.sampled_from([1.0, 2.0, 3.0, 4.5])), max_size=6
    ),
)
def test_no_window_is_weaker(num_blocks: int, num_hosted: int, servers: list[tuple[int, int, float]]) -> None:
    view = swarm(*((f"{start}:{start + size}", speed) for start, size, speed in servers), num_blocks=20)
    chosen = choose_span(view, num_blocks, num_hosted)

    def weakness(first: int) -> list[float]:
        return sorted(
            sum(speed for start, size, speed in servers if start <= block < start + size)
            for block in range(first, first + len(chosen))
        )

    assert len(chosen) == min(num_hosted, num_blocks) and chosen.end <= num_blocks
    windows = range(num_blocks - len(chosen) + 1)
    assert all(weakness(chosen.start) <= weakness(first) for first in windows)
    assert all(weakness(chosen.start) < weakness(first) for first in windows if first < chosen.start)
