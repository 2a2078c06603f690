"""Servers that are told how much to host find out what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.span import Span
from swarm_server.machine.memory import hosted_bytes
from swarm_server.node import moving, server
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, random_ids
from tests.swarm.waiting import wait_for
from tests.zoo import BLOCKS, save_checkpoint

ANYWHERE = "0:1"  # overridden


@pytest.fixture
def servers(tmp_path) -> Iterator[InProcessServers]:
    directory = tmp_path / "llama"
    save_checkpoint("llama", directory)
    with InProcessServers(directory, memory_dht=True) as servers:
        yield servers


def test_memory_decides_how_many_blocks_and_how_much_room(servers):
    block_bytes = max(hosted_bytes(ModelCheckpoint.open(servers.model), "none"))
    memory_bytes = 4 * block_bytes
    servers.start(ANYWHERE, blocks=None, memory_bytes=memory_bytes, cache_tokens=None)
    (record,) = servers.describe()
    assert len(record.span) == 3  # a fifth is for keys and values
    token_bytes = 3 * 256 + 256  # of three blocks, and the output
    assert record.cache_tokens_left == (memory_bytes - 3 * block_bytes) // token_bytes


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_blocks": BLOCKS + 1}, f"{BLOCKS + 1} blocks are more than the model's {BLOCKS}"),
        ({"memory_bytes": 1000}, r"not enough memory in 0 MiB for one block, which takes \d\.\d MiB"),
    ],
)
def test_what_cannot_be_is_said(servers, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        servers.start(ANYWHERE, blocks=None, **options)


@pytest.mark.promise("servers that start at the same time agree who takes which blocks")
def test_servers_that_start_at_once_cover_the_model(servers):
    servers.start("0:2", "2:4")  # so that those below have somebody to agree with
    servers.start(*[ANYWHERE] * 2, blocks=None, num_blocks=2)
    spans = [record.span for record in servers.records()]
    assert spans.count(Span(4, 6)) == 1  # which is best for both


@pytest.mark.promise("when all servers of some blocks are gone, others take them over, and then stay")
def test_a_gap_closes(servers, monkeypatch):
    """One of two that hold the left half comes over to the right one; the other stays."""
    monkeypatch.setattr(server, "CHECK_S", (0.1, 0.3))
    monkeypatch.setattr(moving, "CONFIRM_S", 0.1)
    left, right, all_blocks = Span(0, 3), Span(3, 6), [Span(0, 3), Span(3, 6)]
    servers.start(*[ANYWHERE] * 2, blocks=None, initial_blocks=left)
    (leaving,) = servers.start(str(right))
    prompt = random_ids(1, 8, seed=0)
    with connected(servers) as remote:
        before = remote.generate(prompt, max_new_tokens=4, do_sample=False)
        servers.stop(leaving)
        wait_for(lambda: [record.span for record in servers.records()] == all_blocks, "the gap is closed")
        after = remote.generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(before, after)
