"""Standby replicas of a session are kept on other servers: when one fails, next to nothing is computed again."""

from __future__ import annotations

import pytest

from swarm_client.core import background
from swarm_client.transport.hops import HopSession
from tests.swarm.pair import random_ids
from tests.swarm.survival import SPANS, Client
from tests.swarm.waiting import wait_for

PROMPT = random_ids(1, 40, seed=10)


@pytest.fixture
def client(connect) -> Client:
    return connect(standby=True)


def wait_for_copies(client: Client) -> None:
    (chain,) = client.chains
    wait_for(lambda: chain._standby.num_ready == len(SPANS), "every hop has a copy")


def wait_for_equal_copies(client: Client) -> None:
    """A copy gets a step after the client has its answer; one that lacks a reorder of beams cannot take over."""
    wait_for_copies(client)
    (chain,) = client.chains

    def progress_of(hop: HopSession | None):
        return None if hop is None else background.run(hop.progress())

    wait_for(
        lambda: all(progress_of(chain._standby.of(hop)) == progress_of(hop) for hop in chain.hops),
        "every copy has all that its hop has",
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.promise("a standby replica takes over at once")),
        pytest.param({"num_beams": 3}, id="beams"),
    ],
)
def test_a_copy_takes_over(client, moments, options):
    moments.before_step(4, lambda: wait_for_copies(client))
    moments.before_step(8, lambda: (wait_for_equal_copies(client), client.kill(1)))
    client.generate(PROMPT, **options)
    assert client.moved_blocks == ["2:4"]
    (recovery,) = client.recoveries
    assert recovery.from_copy and recovery.replayed_tokens <= 2
