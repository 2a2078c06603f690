"""Servers die, hang and come back while a client generates: its tokens stay those of the whole model.

Each fault at each moment, of each hop, is in ``tests/unit/client/sessions/test_faults_simulated.py``. Here are the ones
that only real processes, connections and models can show.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest
import torch

from swarm_client.core.config import Timeouts
from swarm_client.core.events import Waiting
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.listener import ChainListener, Failures
from swarm_client.transport.hops import BlockAnswer, HopSession
from tests.swarm.pair import NEW_TOKENS, random_ids
from tests.swarm.processes import lone_client
from tests.swarm.survival import ROOM, Fleet, room_left
from tests.swarm.tuning import assert_close
from tests.swarm.waiting import wait_for

PROMPT = random_ids(1, 8, seed=0)


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


@pytest.mark.promise("a server that hangs is replaced while its machine still holds the connection")
def test_hangs(connect, moments):
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


# ------------------------------------------------------------ the client dies


IDS = random_ids(1, 30, seed=40)


def test_killed_in_the_middle_of_a_generation(fleet, cache_home):
    """Its sessions and their copies are gone, and so are its connections; those between servers may stay."""
    task = [str(fleet.model), {"swarm": fleet.swarm, "standby": True}, IDS[0].tolist(), 50, 5]
    client = lone_client(task, {**os.environ, "XDG_CACHE_HOME": str(cache_home)})
    try:
        assert all(client.stdout.readline() for _ in range(5))
        wait_for(lambda: all(room_left(server) < ROOM for server in fleet.running), "the session has copies")
        ports = {connection.laddr.port for connection in connections(client.pid)}
        assert num_connected(fleet, ports) >= len(fleet.running)
    finally:
        client.kill()
    fleet.wait_until_all_room_is_free()
    wait_for(lambda: num_connected(fleet, ports) == 0, "the connections are closed")


def num_connected(fleet: Fleet, ports: set[int]) -> int:
    """How many of the servers' connections lead to these ports."""
    return sum(connection.raddr.port in ports for server in fleet.running for connection in connections(server.pid))


def connections(pid: int) -> list:
    return [connection for connection in psutil.Process(pid).net_connections("tcp") if connection.raddr]
