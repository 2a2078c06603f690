"""Configurations of experts' servers that cannot be are refused, and the reason is given."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_training.experts.core.config import ExpertServerConfig


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"num_experts": 5}, "5 experts: expected 1 to 4"),
        ({"learning_rate": -1e-3}, "learning_rate is -0.001"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0: expected a number above 0"),
        ({"max_batch_rows": 0}, "max_batch_rows is 0"),
        ({"max_queued_rows": 0}, "max_queued_rows is 0"),
        ({"port": 1 << 16}, "port is 65536: expected 0 to 65535"),
        ({"announce_host": "192.0.2.1", "port": 1}, "expected ports that are not 0"),
        ({"host": "0.0.0.0"}, "nobody can call 0.0.0.0"),
        ({"window_s": 30.0, "lifetime_s": 30.0}, "window_s is 30.0: expected 0 to less than 30.0"),
        ({"lifetime_s": 121.0}, "lifetime_s is 121.0: expected seconds above 0, up to 120"),
        ({"save_every_s": 0.0}, "save_every_s is 0.0"),
        ({"cells": ((0, 0), (0, 0))}, "expected different ones"),
        ({"cells": ((0, 2), (0, 1))}, "expected different ones of the grid"),
        ({"cells": ((0, 0),)}, "1 cells for 2 experts"),
        ({"replicas": -1}, "replicas is -1: expected 0 to 8"),
        ({"replica_bytes": -1}, "replica_bytes is -1: expected at least 0"),
        ({"adopt": -1}, "adopt is -1: expected at least 0"),
        ({"replicate_every_s": 0.0}, "replicate_every_s is 0.0"),
        ({"adopt_after_s": 0.0}, "adopt_after_s is 0.0: expected seconds above 0"),
    ],
)
def test_what_is_out_of_range_is_refused(changed: dict[str, Any], reason: str) -> None:
    fitting: dict[str, Any] = {"name": "demo", "hidden": 8, "grid": (2, 2), "num_experts": 2}
    ExpertServerConfig(**fitting)
    with pytest.raises(ValueError, match=reason):
        ExpertServerConfig(**(fitting | changed))
