"""Has the rows of small batches divided among lanes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swarm_client.routing import pipelining
from swarm_client.routing.routing import Costs, Route
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.span import Span


def always_divided(patch: pytest.MonkeyPatch, least_rows: int) -> None:
    """So many rows are enough for a lane, and the more lanes the better."""
    patch.setattr(pipelining, "_LEAST_ROWS", least_rows)
    patch.setattr(pipelining, "_is_known", lambda _hop: True)
    patch.setattr(pipelining, "step_s", lambda lanes, _sizes: 1 / len(lanes))


def on_the_same_servers(patch: pytest.MonkeyPatch) -> None:
    """All lanes, however much those servers seem to have to do."""
    spread = pipelining.spread

    def same(view: SwarmView, blocks: Span, sizes: Sequence[int], costs: Costs) -> list[Route]:
        return spread(view, blocks, sizes[:1], costs) * len(sizes)

    patch.setattr(pipelining, "spread", same)
