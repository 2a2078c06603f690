"""A group with near servers is proposed if it would be faster than they are, with numbers and a command."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_server.core.config import ServerConfig
from swarm_server.node.proposing import group_proposal, near_servers
from swarm_server.node.server import _propose_group
from tests.unit.support import server_record
from tests.zoo import save_checkpoint

BLOCK_BYTES, HIDDEN = 44e6, 2048


def server(peer_id: str, address: str, blocks: str = "0:4", **fields: object) -> ServerRecord:
    """Return a server that reads 15 GB of weights per second: 2.9 ms for a block."""
    return server_record(peer_id, blocks, addresses=(address,), **{"quant": "int8", "tokens_per_s": 85.0, **fields})


OWN = server("own", "192.168.1.5:31330", network_tokens_per_s=1250e6 / 4 / HIDDEN)
OTHER = server("other", "192.168.1.6:31330", "4:8")


@pytest.mark.parametrize(
    ("other", "is_near"),
    [
        (OTHER, True),
        (server("other", "192.168.2.6:1"), True),
        (server("other", "10.0.0.6:1"), False),
        (server("other", "8.8.8.8:1"), False),
        (server("other", "example.org:1"), False),
        (server("other", "192.168.1.5:2"), False),  # another process of this machine
        (server("other", "/ip4/192.168.1.9/tcp/1/p2p/QmRelay/p2p-circuit/p2p/QmOther"), False),
        (server("other", "192.168.1.6:1", quant="int4"), False),
        (server("other", "192.168.1.6:1", revision="older"), False),
        (server("other", "192.168.1.6:1", members=2), False),
        (server("other", "192.168.1.6:1", state=ServerState.JOINING), False),
    ],
)
def test_near_servers_are_other_machines_of_the_same_network_that_compute_alike(other, is_near: bool) -> None:
    assert near_servers(OWN, [OWN, other]) == ([other] if is_near else [])
    assert near_servers(server("own", "127.0.0.1:1"), [other]) == []


def test_a_group_is_proposed_where_it_pays() -> None:
    proposal = group_proposal(OWN, [OTHER], {"other": 2e-4}, BLOCK_BYTES, HIDDEN)
    # Half of a block takes 1.47 ms; four exchanges take 4 × (0.2 ms + 16 KiB at 10 Gbit/s)
    assert proposal is not None and proposal.hosts == ("192.168.1.5", "192.168.1.6")
    assert proposal.payoff.gain == pytest.approx(1 / 340 / (1 / 680 + 4 * (2e-4 + 16384 / 1250e6)))
    sentence = proposal.sentence("swarm server")
    assert "a group with 192.168.1.6 would reach 1.27 × one session's speed without a group" in sentence
    assert "RTT 0.20 ms" in sentence and "15.0 and 15.0 GB/s" in sentence
    command = sentence.partition("type: ")[2]
    assert command == "swarm server --group-size 2 --group-listen 192.168.1.5:31400 --group-key group.key"


def test_no_group_is_proposed_where_none_pays() -> None:
    assert group_proposal(OWN, [OTHER], {"other": 9e-4}, BLOCK_BYTES, HIDDEN) is None  # exchanges take longer
    assert group_proposal(OWN, [OTHER], {"other": 1.1e-3}, 1e9, HIDDEN) is None  # not near
    assert group_proposal(OWN, [OTHER], {}, BLOCK_BYTES, HIDDEN) is None  # it does not answer
    slow = server("slow", "192.168.1.7:1", tokens_per_s=10.0)
    assert group_proposal(OWN, [slow], {"slow": 1e-4}, BLOCK_BYTES, HIDDEN) is None
    assert group_proposal(OWN, [], {}, BLOCK_BYTES, HIDDEN) is None
    slower_line = replace(OWN, network_tokens_per_s=0.0)  # not measured: 1 Gbit/s
    assert group_proposal(slower_line, [OTHER], {"other": 2e-4}, BLOCK_BYTES, HIDDEN) is None


def test_a_slow_server_is_left_out_of_the_group() -> None:
    slow = server("slow", "192.168.1.7:1", tokens_per_s=20.0)
    proposal = group_proposal(OWN, [slow, OTHER], {"slow": 1e-4, "other": 1e-4}, BLOCK_BYTES, HIDDEN)
    assert proposal is not None and proposal.hosts == ("192.168.1.5", "192.168.1.6")


def test_the_proposal_is_logged_with_the_flags_of_this_server(tmp_path: Path, caplog) -> None:
    save_checkpoint("llama", tmp_path)
    config = ServerConfig(model=str(tmp_path), swarm="home")
    joined = SimpleNamespace(starting=SimpleNamespace(config=config, checkpoint=ModelCheckpoint.open(tmp_path)))

    class Neighbourhood:
        """Stands for the monitor, which knows the servers, and for the probe, which measures the way to them."""

        async def view(self, own: ServerRecord) -> SwarmView:
            return SwarmView((own, OTHER))

        async def shortest_rtts_s(self, servers: Sequence[ServerRecord]) -> dict[str, float]:
            return {server.peer_id: 1e-4 for server in servers}

    with caplog.at_level(logging.INFO, "swarm_server.node.server"):
        for own in (server("own", "127.0.0.1:1"), OWN):
            asyncio.run(_propose_group(joined, own, Neighbourhood(), Neighbourhood()))
    (line,) = caplog.messages
    assert f"--model {tmp_path} --swarm home --group-size 2 --group-listen 192.168.1.5:31400" in line
