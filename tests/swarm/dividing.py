"""Has the rows of small batches divided among lanes."""

from __future__ import annotations

import pytest

from swarm_client.routing import pipelining


def always_divided(patch: pytest.MonkeyPatch, least_rows: int) -> None:
    """So many rows are enough for a lane, and the more lanes the better."""
    patch.setattr(pipelining, "_LEAST_ROWS", least_rows)
    patch.setattr(pipelining, "_is_known", lambda _hop: True)
    patch.setattr(pipelining, "step_s", lambda lanes, _sizes: 1 / len(lanes))
