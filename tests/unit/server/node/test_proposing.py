"""A group with near servers is proposed if it would be faster than they are, with numbers and what to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.dht.records import ServerRecord, ServerState, SwarmView
from swarm_server.core.config import ServerConfig
from swarm_server.net.network_probe import MeasuredLink
from swarm_server.node import proposing
from swarm_server.node.proposing import group_proposal, near_servers
from swarm_server.node.server import _propose_group
from tests.unit.support import server_record
from tests.zoo import save_checkpoint

BLOCK_BYTES, HIDDEN = 44e6, 2048


def server(peer_id: str, address: str, blocks: str = "0:4", **fields: object) -> ServerRecord:
    """Return a server that reads 15 GB of weights per second: 2.9 ms for a block."""
    return server_record(peer_id, blocks, addresses=(address,), **{"quant": "int8", "tokens_per_s": 85.0, **fields})


def link(rtt_s: float, bytes_per_s: float = 1250e6) -> MeasuredLink:
    return MeasuredLink(rtt_s, bytes_per_s)


OWN = server("own", "192.168.1.5:31330")
OTHER = server("other", "192.168.1.6:31330", "4:8")


@pytest.mark.parametrize(
    ("other", "is_near"),
    [
        (OTHER, True),
        (server("other", "192.168.2.6:1"), True),
        (server("other", "10.0.0.6:1"), False),
        (server("other", "8.8.8.8:1"), False),
        (server("other", "example.org:1"), False),
        (server("other", "no:address"), False),
        (server("other", "192.168.1.5:2"), False),  # another process of this machine
        (server("other", "/ip4/192.168.1.9/tcp/1/p2p/QmRelay/p2p-circuit/p2p/QmOther"), False),
        (server("other", "192.168.1.6:1", quant="int4"), False),
        (server("other", "192.168.1.6:1", revision="older"), False),
        (server("other", "192.168.1.6:1", members=2), False),
        (server("other", "192.168.1.6:1", forward_tokens_per_s=85.0), False),  # as --throughput has it
        (server("other", "192.168.1.6:1", state=ServerState.JOINING), False),
    ],
)
def test_near_servers_are_other_machines_of_the_same_network_that_compute_alike(other, is_near: bool) -> None:
    assert near_servers(OWN, [OWN, other]) == ([other] if is_near else [])
    assert near_servers(server("own", "127.0.0.1:1"), [other]) == []


def test_a_machine_with_several_servers_counts_once_with_the_fastest() -> None:
    slower, fastest = (server(f"at {rate}", f"192.168.1.6:{rate}", tokens_per_s=rate) for rate in (30, 40))
    assert near_servers(OWN, [slower, fastest]) == near_servers(OWN, [fastest, slower]) == [fastest]


def test_a_group_is_proposed_where_it_pays() -> None:
    proposal = group_proposal(OWN, [OTHER], {"other": link(2e-4)}, BLOCK_BYTES, HIDDEN)
    # Half of a block takes 1.47 ms; four exchanges take 4 × (0.2 ms + 16 KiB at 10 Gbit/s)
    assert proposal is not None and proposal.others == ("192.168.1.6",)
    assert proposal.payoff.gain == pytest.approx(1 / 340 / (1 / 680 + 4 * (2e-4 + 16384 / 1250e6)))
    sentence = proposal.sentence()
    assert "a group with 192.168.1.6 would reach 1.27 × one session's speed without a group" in sentence
    assert "RTT 0.20 ms" in sentence and "15.0 and 15.0 GB/s" in sentence
    assert "with its own flags and --group lab --group-size 2 --group-key group.key, but without --blocks" in sentence


def test_no_group_is_proposed_where_none_pays() -> None:
    assert group_proposal(OWN, [OTHER], {"other": link(9e-4)}, BLOCK_BYTES, HIDDEN) is None  # exchanges take longer
    assert group_proposal(OWN, [OTHER], {}, BLOCK_BYTES, HIDDEN) is None  # it is not near, or does not answer
    slow = server("slow", "192.168.1.7:1", tokens_per_s=10.0)
    assert group_proposal(OWN, [slow], {"slow": link(1e-4)}, BLOCK_BYTES, HIDDEN) is None
    assert group_proposal(OWN, [], {}, BLOCK_BYTES, HIDDEN) is None
    assert group_proposal(OWN, [OTHER], {"other": link(2e-4, 125e6)}, BLOCK_BYTES, HIDDEN) is None  # 1 Gbit/s


def test_a_slow_server_is_left_out_of_the_group() -> None:
    slow = server("slow", "192.168.1.7:1", tokens_per_s=20.0)
    proposal = group_proposal(OWN, [slow, OTHER], {"slow": link(1e-4), "other": link(1e-4)}, BLOCK_BYTES, HIDDEN)
    assert proposal is not None and proposal.others == ("192.168.1.6",)


class Neighbourhood:
    """Stands for the monitor, which knows the servers, and for the probe, which measures the way to them."""

    async def view(self, own: ServerRecord) -> SwarmView:
        return SwarmView((own, OTHER))

    async def links(self, servers: Sequence[ServerRecord], most_rtt_s: float) -> dict[str, MeasuredLink]:
        assert most_rtt_s == 1e-3
        return {server.peer_id: link(1e-4) for server in servers}


@pytest.fixture
def checkpoint(tmp_path: Path) -> ModelCheckpoint:
    save_checkpoint("llama", tmp_path)
    return ModelCheckpoint.open(tmp_path)


def proposed(caplog, checkpoint: ModelCheckpoint, own: ServerRecord = OWN, **config: Any) -> list[str]:
    """Return what a server logs after its start."""
    caplog.clear()
    joined = SimpleNamespace(starting=SimpleNamespace(config=ServerConfig(**config), checkpoint=checkpoint))
    with caplog.at_level(logging.INFO, "swarm_server.node.server"):
        asyncio.run(_propose_group(joined, own, Neighbourhood(), Neighbourhood()))
    return caplog.messages


def test_a_server_proposes_only_groups_that_can_be_formed(checkpoint: ModelCheckpoint, caplog, monkeypatch) -> None:
    (line,) = proposed(caplog, checkpoint)
    assert line.startswith("a group with 192.168.1.6 would reach")
    assert proposed(caplog, checkpoint, server("own", "127.0.0.1:1")) == []
    assert proposed(caplog, checkpoint, replace(OWN, forward_tokens_per_s=OWN.tokens_per_s)) == []  # --throughput
    assert proposed(caplog, checkpoint, group="lab", group_size=2, group_key=Path("group.key")) == []
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "files", object())  # such as those that come from the swarm
        assert proposed(caplog, checkpoint) == []
    monkeypatch.setattr(proposing, "kernel", lambda: None)
    assert proposed(caplog, checkpoint) == []
