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
        ({"learning_rate": -1e-3}, "learning rate"),
        ({"max_grad_norm": 0.0}, "norm of gradients"),
        ({"max_batch_rows": 0}, "rows of a batch and of the queue"),
        ({"max_queued_rows": 0}, "rows of a batch and of the queue"),
        ({"port": 1 << 16}, "ports 65536 and 0"),
        ({"announce_host": "192.0.2.1", "port": 1}, "expected ports that are not 0"),
        ({"host": "0.0.0.0"}, "nobody can call 0.0.0.0"),
        ({"window_s": 30.0, "lifetime_s": 30.0}, "window, lifetime"),
        ({"save_every_s": 0.0}, "time between saves"),
        ({"cells": ((0, 0), (0, 0))}, "expected different ones"),
        ({"cells": ((0, 2), (0, 1))}, "expected different ones of the grid"),
        ({"cells": ((0, 0),)}, "1 cells for 2 experts"),
        ({"replicas": -1}, "replicas: expected 0 to"),
        ({"replica_bytes": -1}, "at least 0 for the memory"),
        ({"adopt": -1}, "experts to adopt"),
        ({"replicate_every_s": 0.0}, "time between replicas"),
        ({"adopt_after_s": 0.0}, "before experts are adopted"),
    ],
)
def test_what_is_out_of_range_is_refused(changed: dict[str, Any], reason: str) -> None:
    fitting: dict[str, Any] = {"name": "demo", "hidden": 8, "grid": (2, 2), "num_experts": 2}
    ExpertServerConfig(**fitting)
    with pytest.raises(ValueError, match=reason):
        ExpertServerConfig(**(fitting | changed))
