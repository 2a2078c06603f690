"""Servers die, hang and come back while a client generates: its tokens stay those of the whole model."""

from __future__ import annotations

import asyncio
import signal

import pytest
import torch
from transformers import DynamicCache

from swarm_client import RecoveryFailed
from swarm_client.core.config import Timeouts
from swarm_client.core.events import Waiting
from swarm_client.sessions.call import Call
from swarm_client.sessions.listener import Failures, Listener
from swarm_client.sessions.session import RemoteSession
from swarm_client.transport.hops import BlockAnswer, HopSession
from swarm_protocol.span import Span
from tests.drafts import Always, KnowingDraft
from tests.marks import SLOW, always
from tests.swarm.dividing import always_divided, on_the_same_servers
from tests.swarm.pair import NEW_TOKENS, random_ids
from tests.swarm.survival import SPANS, each_hop
from tests.swarm.tuning import assert_close
from tests.zoo import PAD

PROMPT = random_ids(1, 8, seed=0)
REPETITIVE = random_ids(1, 6, seed=1).repeat(1, 3)


def long_prompt(seed: int) -> torch.Tensor:
    """Comes in seven chunks; servers have not seen it before."""
    return random_ids(1, 200, seed=100 + seed)


# ------------------------------------------------------------ one server dies


@each_hop(0, 1)
def test_killed_between_two_steps(client, moments, hop):
    moments.before_step(5, lambda: client.kill(hop))
    output = client.generate(PROMPT)
    assert client.moved_blocks == [SPANS[hop]]
    stats = output.past_key_values.session.stats
    assert (stats.recoveries, stats.moves, stats.waits) == (1, 0, 0)
    assert stats.replayed_tokens == client.recoveries[0].replayed_tokens > 0
    assert stats.steps == NEW_TOKENS and stats.stall_s > 0


@each_hop(1)
@pytest.mark.parametrize("moment", ["after_sending", pytest.param("after_answer", marks=SLOW)])
def test_killed_in_a_long_prompt(client, moments, hop, moment):
    getattr(moments, moment)(2, lambda: client.kill(hop))
    client.generate(long_prompt(hop))
    assert client.moved_blocks == [SPANS[hop]]


@each_hop(1)
def test_killed_in_the_middle_of_a_step(client, moments, hop):
    """The hops before have done their part of it."""
    victims = []

    def stop() -> None:
        victims.append(client.server(hop))
        victims[0].signal(signal.SIGSTOP)

    async def kill() -> None:
        before = client.chain.hops[:hop]
        while before and (await before[-1].progress()).number <= client.chain.number:
            await asyncio.sleep(0.01)
        victims[0].kill()

    moments.before_step(5, stop)
    moments.after_sending(5, kill)
    client.generate(PROMPT)
    assert client.moved_blocks == [SPANS[hop]]


@each_hop(0, 1)
def test_killed_under_a_batch_in_lanes(client, moments, monkeypatch, hop):
    """Each lane goes on with another server by itself."""
    always_divided(monkeypatch, 2)
    on_the_same_servers(monkeypatch)
    moments.before_step(5, lambda: client.fleet.find(client.chains[0].hops[hop].hop.server.peer_id).kill())
    output = client.generate(random_ids(4, 8, seed=3))
    assert client.moved_blocks == [SPANS[hop]] * 2
    stats, stalls = output.past_key_values.session.stats, [recovery.stall_s for recovery in client.recoveries]
    assert stats.recoveries == 2 == len(client.chains)
    assert max(stalls) - 0.01 <= stats.stall_s < sum(stalls) - 0.01  # they stood still at the same time


@each_hop(1)
def test_hangs(connect, moments, hop):
    """Its machine still holds the connection."""
    client = connect(timeouts=Timeouts(probe_after_s=0.2, probe_s=5.0))
    moments.before_step(5, lambda: client.server(hop).signal(signal.SIGSTOP))
    client.generate(PROMPT)
    assert client.moved_blocks == [SPANS[hop]]


@each_hop(1)
@pytest.mark.parametrize("moment", ["before_step", pytest.param("before-they-come", marks=SLOW)])
def test_killed_while_hidden_states_of_every_block_are_wanted(client, moments, monkeypatch, hop, moment):
    """Also when its outputs have gone on to the next server, and those of its blocks have not come to the client."""
    take, lost = Listener._take_block_output, []

    def lose(listener: Listener, answer: BlockAnswer, sender: HopSession, call: Call) -> Failures:
        if call.start == PROMPT.shape[1] + 3 and sender is client.chain.hops[hop] and (not lost or sender is lost[0]):
            if not lost:
                lost.append(sender)
                client.kill(hop)
            return {}
        return take(listener, answer, sender, call)

    if moment == "before_step":
        moments.before_step(5, lambda: client.kill(hop))
    else:
        monkeypatch.setattr(Listener, "_take_block_output", lose)
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
    assert bool(lost) == (moment != "before_step")


# ------------------------------------------------------------ several die


@pytest.mark.parametrize(
    ("hops", "moved"),
    [
        pytest.param((0, 1), ["0:4"], id="first-two", marks=SLOW),
        pytest.param((1, 2), ["2:6"], id="last-two", marks=SLOW),
        pytest.param((0, 2), ["4:6", "0:2"], id="not-neighbours"),
        pytest.param((0, 1, 2), ["0:6"], id="all"),
    ],
)
def test_several_killed_at_once(client, moments, hops, moved):
    moments.before_step(5, lambda: client.kill(*hops))
    client.generate(PROMPT)
    assert client.moved_blocks == moved


@pytest.mark.parametrize("moment", [pytest.param("before-the-replay", marks=SLOW), "during-the-replay"])
def test_the_one_that_takes_over_is_killed_too(fleet, client, moments, monkeypatch, moment):
    third = fleet.add("2:4", "--throughput", "1")
    fleet.wait_ready(third)
    reroute, killed = HopSession.reroute, []

    async def deadly(hop: HopSession, to: HopSession, resend, codec) -> None:
        if moment == "during-the-replay":
            await reroute(hop, to, resend, codec)
        if not killed:
            killed.append(to.hop.server.peer_id)
            fleet.find(killed[0]).kill()
        if moment == "before-the-replay":
            await reroute(hop, to, resend, codec)

    monkeypatch.setattr(HopSession, "reroute", deadly)
    moments.before_step(5, lambda: client.kill(1))
    client.generate(PROMPT)
    assert set(client.moved_blocks) == {"2:4"} and killed
    assert client.recoveries[-1].replacements == (third.peer_id,)


@SLOW
def test_the_one_that_takes_over_from_the_first_is_killed_too(fleet, client, moments):
    third = fleet.add("0:2", "--throughput", "1")
    fleet.wait_ready(third)
    moments.before_step(5, lambda: client.kill(0))
    moments.after_replaying(1, lambda: client.kill(0))
    client.generate(PROMPT)
    assert set(client.moved_blocks) == {"0:2"}
    assert client.recoveries[-1].replacements == (third.peer_id,)


# ------------------------------------------------------------ nobody is left


@each_hop(1)
@pytest.mark.parametrize("who", ["the-same", pytest.param("another", marks=SLOW)])
def test_everybody_is_gone_and_somebody_comes_later(fleet, client, moments, hop, who):
    """A server that comes back with its old identity has forgotten the session."""
    killed, came = [], []

    def start(event) -> None:
        if isinstance(event, Waiting) and not came:
            came.append(fleet.restart(killed[0]) if who == "the-same" else fleet.add(SPANS[hop]))

    client.listen(start)
    moments.before_step(5, lambda: killed.extend(fleet.kill_replicas(SPANS[hop])))
    client.generate(PROMPT)
    assert len(client.waits) == 1 and SPANS[hop] in client.waits[0].reason
    assert client.recoveries[-1].replacements == (came[0].peer_id,)


@SLOW
def test_the_server_of_a_chat_was_restarted_meanwhile(fleet, client):
    """There is no other."""
    chat = client.generate(PROMPT)
    its_server = client.server(1)
    fleet.kill_replicas("2:4")
    restarted = fleet.restart(its_server)
    fleet.wait_ready(restarted)
    client.generate(torch.cat([chat.sequences, PROMPT], 1), past_key_values=chat.past_key_values)
    assert client.moved_blocks == ["2:4"]
    assert client.recoveries[0].failed == client.recoveries[0].replacements == (restarted.peer_id,)


@SLOW
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


def test_the_wait_is_bounded_and_the_session_goes_on_later(fleet, connect):
    client = connect(recovery_timeout_s=10.0)  # time to try servers that are gone more than once
    cache = DynamicCache()
    tokens = PROMPT

    def one_more(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits = client.model(tokens[:, cache.get_seq_length() :], past_key_values=cache).logits
        return torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)

    for _ in range(5):
        tokens = one_more(tokens)
    victim = client.server(1)
    killed = fleet.kill_replicas("2:4")
    with pytest.raises(RecoveryFailed, match="Nothing is lost: the session goes on from where it stood") as caught:
        one_more(tokens)
    assert len(client.waits) == 1
    error = caught.value
    assert (error.peer_id, error.span) == (victim.peer_id, Span(2, 4))
    for server in killed:
        assert any(server.peer_id[-6:] in sentence or server.ready["grpc"] in sentence for sentence in error.tried)
    fleet.wait_ready(fleet.restart(killed[0]))
    client.wait_until_it_knows_all()
    for _ in range(NEW_TOKENS - 5):
        tokens = one_more(tokens)
    assert torch.equal(tokens, fleet.whole.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False))


# ------------------------------------------------------------ ways to generate

PADDED = random_ids(2, 14, seed=2)
PADDED[0, :4] = PAD
WAYS = {
    "beams": (PROMPT, {"num_beams": 3}),
    "padding": (PADDED, {"attention_mask": (PADDED != PAD).long()}),
    "speculation": (REPETITIVE, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 24}),
    "sampling": (PROMPT, {"do_sample": True, "top_k": 20}),
    "samples": (PADDED, {"attention_mask": (PADDED != PAD).long(), "do_sample": True, "num_return_sequences": 2}),
}


OFTEN = "beams", "speculation"


@pytest.mark.parametrize("way", always(*OFTEN, among=WAYS))
def test_whatever_way_of_generating(client, moments, way):
    ids, options = WAYS[way]
    moments.before_step(5, lambda: client.kill(1))
    client.generate(ids, **options)
    assert client.moved_blocks == ["2:4"]


@each_hop(1)
@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("options", [{}, pytest.param({"do_sample": True, "top_k": 20}, marks=SLOW)])
def test_killed_while_guesses_are_verified(client, moments, monkeypatch, hop, rows, options):
    """The guesses are dropped; what is confirmed is replayed, and verified again."""
    torch.manual_seed(3)
    ways = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    text = client.fleet.whole.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **ways)[0].tolist()
    monkeypatch.setattr(RemoteSession, "num_sharing", 1)
    monkeypatch.setattr(client.model, "speculation", Always(KnowingDraft([text], 0.6), rows, 2))
    moments.after_sending(4, lambda: client.kill(hop))
    output = client.generate(PROMPT, **options)
    assert client.moved_blocks == [SPANS[hop]]
    assert output.past_key_values.session.stats.steps < NEW_TOKENS


@SLOW
def test_between_two_turns_of_a_chat(client):
    chat = client.generate(PROMPT, past_key_values=DynamicCache())
    client.kill(1)
    client.generate(torch.cat([chat.sequences, PROMPT], 1), past_key_values=chat.past_key_values)
    assert client.moved_blocks == ["2:4"]


def test_chats_that_began_alike(client):
    """The servers have computed what they have in common once: as a rule, both chats are with the same ones."""
    beginning = long_prompt(3)[:, :96]
    chats = [client.generate(torch.cat([beginning, random_ids(1, 5, seed)], 1)) for seed in (4, 5)]
    middles = [chain.hops[1].hop.server.peer_id for chain in client.chains]
    client.fleet.find(middles[0]).kill()
    for chat in chats:
        client.generate(torch.cat([chat.sequences, PROMPT], 1), past_key_values=chat.past_key_values)
    assert client.moved_blocks == ["2:4"] * middles.count(middles[0])
