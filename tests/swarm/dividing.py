"""Has the rows of small batches divided among lanes."""

from __future__ import annotations

import pytest

from swarm_client.routing import pipelining
from swarm_client.sessions import session as sessions


def always_divided(patch: pytest.MonkeyPatch, least_rows: int) -> None:
    """So many rows are enough for a lane, and lanes always worth it."""
    patch.setattr(pipelining, "_LEAST_ROWS", least_rows)
    patch.setattr(sessions, "num_parts", lambda _servers, _links, rows, unit: pipelining.most_parts(rows, unit))
