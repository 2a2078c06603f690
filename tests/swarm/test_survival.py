"""Servers die, hang and come back while a client generates: its tokens stay those of the whole model.

Each fault at each moment, of each hop, is in ``tests/unit/client/sessions/test_faults_simulated.py``. Here are the ones
that only real processes, connections and models can show.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch

from swarm_client.core.config import Timeouts
from swarm_client.core.events import Waiting
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.listener import ChainListener, Failures
from swarm_client.sessions.session import RemoteSession
from swarm_client.transport.hops import BlockAnswer, HopSession
from tests.drafts import Always, KnowingDraft
from tests.swarm.dividing import always_divided, on_the_same_servers
from tests.swarm.pair import NEW_TOKENS, random_ids
from tests.swarm.tuning import assert_close

PROMPT = random_ids(1, 8, seed=0)
REPETITIVE = random_ids(1, 6, seed=1).repeat(1, 3)


def long_prompt(seed: int) -> torch.Tensor:
    """Comes in seven chunks; servers have not seen it before."""
    return random_ids(1, 200, seed=100 + seed)


# ------------------------------------------------------------ one server dies


@pytest.mark.promise("a generation survives the death of a server")
def test_killed_between_two_steps(client, moments):
    moments.before_step(5, lambda: client.kill(0))
    output = client.generate(PROMPT)
    assert client.moved_blocks == ["0:2"]
    stats = output.past_key_values.session.stats
    assert (stats.recoveries, stats.moves, stats.waits) == (1, 0, 0)
    assert stats.replayed_tokens == client.recoveries[0].replayed_tokens > 0
    assert stats.steps == NEW_TOKENS and stats.stall_s > 0


def test_killed_in_the_middle_of_a_step(client, moments):
    """The hops before have done their part of it."""
    victims = []

    def stop() -> None:
        victims.append(client.server(1))
        victims[0].signal(signal.SIGSTOP)

    async def kill() -> None:
        while (await client.chain.hops[0].progress()).number <= client.chain.number:
            await asyncio.sleep(0.01)
        victims[0].kill()

    moments.before_step(5, stop)
    moments.after_sending(5, kill)
    client.generate(PROMPT)
    assert client.moved_blocks == ["2:4"]


def test_killed_under_a_batch_in_lanes(client, moments, monkeypatch):
    """Each lane goes on with another server by itself."""
    always_divided(monkeypatch, 2)
    on_the_same_servers(monkeypatch)
    moments.before_step(5, lambda: client.fleet.find(client.chains[0].hops[1].hop.server.peer_id).kill())
    output = client.generate(random_ids(4, 8, seed=3))
    assert client.moved_blocks == ["2:4"] * 2
    stats, stalls = output.past_key_values.session.stats, [recovery.stall_s for recovery in client.recoveries]
    assert stats.recoveries == 2 == len(client.chains)
    assert max(stalls) - 0.01 <= stats.stall_s < sum(stalls) - 0.01  # they stood still at the same time


@pytest.mark.promise("a server that hangs is replaced while its machine still holds the connection")
def test_hangs(connect, moments):
    """Its machine still holds the connection."""
    client = connect(timeouts=Timeouts(probe_after_s=0.2, probe_s=5.0))
    moments.before_step(5, lambda: client.server(1).signal(signal.SIGSTOP))
    client.generate(PROMPT)
    assert client.moved_blocks == ["2:4"]


def test_killed_while_hidden_states_of_every_block_are_wanted(client, monkeypatch):
    """Its outputs have gone on to the next server, and those of its blocks have not come to the client."""
    take, lost = ChainListener._take_block_output, []

    def lose(listener: ChainListener, answer: BlockAnswer, sender: HopSession, call: SessionCall) -> Failures:
        if call.start == PROMPT.shape[1] + 3 and sender is client.chain.hops[1] and (not lost or sender is lost[0]):
            if not lost:
                lost.append(sender)
                client.kill(1)
            return {}
        return take(listener, answer, sender, call)

    monkeypatch.setattr(ChainListener, "_take_block_output", lose)
    output = client.generate(PROMPT, output_hidden_states=True)
    expected = client.fleet.whole.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    for states, others in zip(output.hidden_states, expected.hidden_states, strict=True):
        for found, whole in zip(states, others, strict=True):
            assert_close(found, whole)
    assert client.moved_blocks == ["0:6"]
    assert lost


# ------------------------------------------------------------ nobody is left


def test_the_member_through_which_the_client_joined_is_gone(fleet, connect, moments):
    """The client finds a server that came after that."""
    entrance = fleet.replicas("4:6")[0]
    client = connect(initial_peers=[entrance.ready["peer"]])
    came = []

    def start(event) -> None:
        if isinstance(event, Waiting) and not came:
            came.append(fleet.add("2:4"))

    client.listen(start)
    moments.before_step(3, entrance.kill)
    moments.before_step(6, lambda: fleet.kill_replicas("2:4"))
    client.generate(PROMPT)
    assert client.moved_blocks[-1] == "2:4"
    assert client.recoveries[-1].replacements == (came[0].peer_id,)


# ------------------------------------------------------------ ways to generate


def test_killed_under_beams(client, moments):
    moments.before_step(5, lambda: client.kill(1))
    client.generate(PROMPT, num_beams=3)
    assert client.moved_blocks == ["2:4"]


def test_killed_while_guesses_are_verified(client, moments, monkeypatch):
    """The guesses are dropped; what is confirmed is replayed, and verified again."""
    rows, options = 4, {"do_sample": True, "top_k": 20}
    torch.manual_seed(3)
    ways = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    text = client.fleet.whole.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **ways)[0].tolist()
    monkeypatch.setattr(RemoteSession, "num_sharing", 1)
    monkeypatch.setattr(client.model, "speculation", Always(KnowingDraft([text], 0.6), rows, 2))
    moments.after_sending(4, lambda: client.kill(1))
    output = client.generate(PROMPT, **options)
    assert client.moved_blocks == ["2:4"]
    assert output.past_key_values.session.stats.steps < NEW_TOKENS


def test_chats_that_began_alike(client):
    """The servers have computed what they have in common once: as a rule, both chats are with the same ones."""
    beginning = long_prompt(3)[:, :96]
    chats = [client.generate(torch.cat([beginning, random_ids(1, 5, seed)], 1)) for seed in (4, 5)]
    middles = [chain.hops[1].hop.server.peer_id for chain in client.chains]
    client.fleet.find(middles[0]).kill()
    for chat in chats:
        client.generate(torch.cat([chat.sequences, PROMPT], 1), past_key_values=chat.past_key_values)
    assert client.moved_blocks == ["2:4"] * middles.count(middles[0])
