"""What is done to the cache of a distributed model is done to its session, as to a cache of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache

from swarm_client.model.cache import RemoteLayer
from swarm_protocol.errors import RequestRejected
from tests.unit.client.sessions.test_survival_simulated import quiet, run

pytestmark = pytest.mark.run_by(function=run)

LENGTH = 5


@pytest.mark.parametrize("num_removed", [0, 1, 3])
async def test_cropping_removes_the_last_positions(num_removed: int) -> None:
    async with quiet() as swarm:
        session = await swarm.started()
        await swarm.extend(session, [float(value) for value in range(LENGTH)])
        stock, remote = DynamicCache(), Cache(layers=[RemoteLayer(session)])
        stock.update(torch.zeros(1, 1, LENGTH, 2), torch.zeros(1, 1, LENGTH, 2), 0)
        for cache in (stock, remote):
            cache.crop(-num_removed)
        assert remote.get_seq_length() == stock.get_seq_length() == LENGTH - num_removed
        for cache in (stock, remote):
            with pytest.raises(ValueError):
                cache.crop(1)
        with pytest.raises(RequestRejected, match="crop takes the number of positions to remove as a negative number"):
            remote.crop(1)
        swarm.rows = [row[: LENGTH - num_removed] for row in swarm.rows]
        await swarm.extend(session, [7.0, 8.0])
