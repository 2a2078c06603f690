"""Standby replicas of a session are kept on other servers: when one fails, next to nothing is computed again."""

from __future__ import annotations

import pytest

from tests.swarm.pair import random_ids
from tests.swarm.survival import Client
from tests.swarm.waiting import wait_for

PROMPT = random_ids(1, 40, seed=10)


@pytest.fixture
def client(connect) -> Client:
    return connect(standby=True)


def wait_for_copies(client: Client) -> None:
    (chain,) = client.chains
    wait_for(lambda: all(map(chain._standby.of, chain.hops)), "every hop has a copy")


@pytest.mark.promise("a standby replica takes over at once")
def test_a_copy_takes_over(client, moments):
    moments.before_step(4, lambda: wait_for_copies(client))
    moments.before_step(8, lambda: client.kill(1))
    client.generate(PROMPT)
    assert client.moved_blocks == ["2:4"]
    (recovery,) = client.recoveries
    assert recovery.from_copy and recovery.replayed_tokens <= 2
