"""Standby replicas of a session are kept on other servers: when one fails, next to nothing is computed again."""

from __future__ import annotations

import pytest
import torch

from swarm_client.core import background
from swarm_client.demo.local_cluster import LocalServer
from swarm_client.transport.hops import HopSession
from tests.marks import SLOW
from tests.swarm.pair import random_ids
from tests.swarm.survival import SPANS, Client, each_hop
from tests.swarm.waiting import wait_for

PROMPT = random_ids(1, 40, seed=10)


@pytest.fixture
def client(connect) -> Client:
    return connect(standby=True)


def wait_for_copies(client: Client) -> None:
    (chain,) = client.chains
    wait_for(lambda: chain.num_replicas == len(SPANS), "every hop has a copy")


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


@each_hop(1)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_a_copy_takes_over(client, moments, hop, options):
    moments.before_step(4, lambda: wait_for_copies(client))
    moments.before_step(8, lambda: (wait_for_equal_copies(client), client.kill(hop)))
    client.generate(PROMPT, **options)
    assert client.moved_blocks == [SPANS[hop]]
    (recovery,) = client.recoveries
    assert recovery.from_copy and recovery.replayed_tokens <= 2


@each_hop(2)
def test_a_copy_takes_over_in_a_long_prompt(client, moments, hop):
    chat = client.generate(PROMPT)
    wait_for_copies(client)
    moments.after_answer(14, lambda: client.kill(hop))  # of the second prompt, a chunk or two
    talk = torch.cat([chat.sequences, random_ids(1, 150, seed=11 + hop)], 1)
    client.generate(talk, past_key_values=chat.past_key_values)
    assert client.moved_blocks == [SPANS[hop]]
    assert client.recoveries[0].from_copy


def test_the_copy_is_killed_as_well(fleet, client, moments):
    third: LocalServer

    def copied() -> None:
        nonlocal third
        wait_for_copies(client)
        third = fleet.add("2:4", "--throughput", "1")  # or the copy might be there
        fleet.wait_ready(third)

    moments.before_step(4, copied)
    moments.before_step(8, lambda: fleet.kill_replicas("2:4", but=third))
    client.generate(PROMPT)
    assert client.moved_blocks == ["2:4"]
    (recovery,) = client.recoveries
    assert not recovery.from_copy and recovery.replacements == (third.peer_id,)


@SLOW
def test_there_is_another_copy_after_one_has_taken_over(fleet, client, moments):
    third = fleet.add("2:4", "--throughput", "1")
    fleet.wait_ready(third)
    for step in (4, 9):
        moments.before_step(step, lambda: wait_for_copies(client))
        moments.before_step(step + 3, lambda: client.kill(1))
    client.generate(PROMPT, max_new_tokens=15)
    assert client.moved_blocks == ["2:4", "2:4"]
    assert all(recovery.from_copy for recovery in client.recoveries)
