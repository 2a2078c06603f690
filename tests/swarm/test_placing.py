"""Servers that are told how much to host find out what."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client.core.events import Event, Move
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.span import Span
from swarm_server.machine.memory import hosted_bytes
from swarm_server.node import moving, server
from tests.swarm.harness import InProcessServers, Watcher
from tests.swarm.pair import connected, ends_only_at_its_length, random_ids
from tests.swarm.waiting import wait_for
from tests.zoo import save_checkpoint

ANYWHERE = "0:1"  # overridden
LEFT, RIGHT = Span(0, 3), Span(3, 6)
PROMPT = random_ids(1, 8, seed=0)


@pytest.fixture
def servers(tmp_path) -> Iterator[InProcessServers]:
    directory = tmp_path / "llama"
    save_checkpoint("llama", directory)
    with InProcessServers(directory, memory_dht=True) as servers:
        yield servers


def test_memory_decides_how_many_blocks_and_how_much_room(servers):
    block_bytes = max(hosted_bytes(ModelCheckpoint.open(servers.model), "none"))
    memory_bytes = 4 * block_bytes
    with pytest.raises(ValueError, match=r"not enough memory in 0 MiB for one block, which takes \d\.\d MiB"):
        servers.start(ANYWHERE, blocks=None, memory_bytes=1000)
    servers.start(ANYWHERE, blocks=None, memory_bytes=memory_bytes, cache_tokens=None)
    (record,) = servers.describe()
    assert len(record.span) == 3  # a fifth is for keys and values
    token_bytes = 3 * 256 + 256  # of three blocks, and the output
    assert record.cache_tokens_left == (memory_bytes - 3 * block_bytes) // token_bytes


@pytest.mark.promise("servers that start at the same time agree who takes which blocks")
def test_servers_that_start_at_once_cover_the_model(servers):
    servers.start("0:2", "2:4")  # so that those below have somebody to agree with
    servers.start(*[ANYWHERE] * 2, blocks=None, num_blocks=2)
    spans = [record.span for record in servers.records()]
    assert spans.count(Span(4, 6)) == 1  # which is best for both


@pytest.fixture
def quick_to_move(monkeypatch) -> None:
    """Servers look often whether they are needed elsewhere."""
    monkeypatch.setattr(server, "CHECK_S", (0.1, 0.3))
    monkeypatch.setattr(moving, "CONFIRM_S", 0.1)


@pytest.mark.usefixtures("quick_to_move")
@pytest.mark.promise("when all servers of some blocks are gone, others take them over, and then stay")
def test_a_gap_closes(servers):
    """One of two that hold the left half comes over to the right one; the other stays."""
    servers.start(*[ANYWHERE] * 2, blocks=None, initial_blocks=LEFT)
    (leaving,) = servers.start(str(RIGHT))
    with connected(servers) as remote:
        before = remote.generate(PROMPT, max_new_tokens=4, do_sample=False)
        servers.stop(leaving)
        wait_for(lambda: [record.span for record in servers.records()] == [LEFT, RIGHT], "the gap is closed")
        after = remote.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert torch.equal(before, after)


@pytest.mark.usefixtures("quick_to_move")
def test_a_session_goes_on_when_its_server_moves(servers):
    """A second server comes to the left half: the first is needed more in the right one, and hands its session over."""
    servers.start(ANYWHERE, blocks=None, initial_blocks=LEFT)
    servers.start(str(RIGHT))
    (first, _) = servers.records()
    events: list[Event] = []

    def another_comes() -> None:
        servers.start(str(LEFT))
        wait_for(lambda: events, "the session has moved")

    options = {"max_new_tokens": 12, "do_sample": False}
    whole = ends_only_at_its_length(AutoModelForCausalLM.from_pretrained(servers.model, dtype=torch.float32))
    with connected(servers, on_event=events.append) as remote:
        found = remote.generate(PROMPT, streamer=Watcher(3, another_comes), **options)
    assert torch.equal(found, whole.generate(PROMPT, **options))
    (moved,) = events
    assert isinstance(moved, Move) and (moved.server, moved.span) == (first.peer_id, LEFT)
    assert moved.copied_tokens >= PROMPT.shape[1]

    def has_other_blocks() -> bool:
        spans = {record.peer_id: record.span for record in servers.records()}
        return spans.get(first.peer_id, LEFT) != LEFT

    wait_for(has_other_blocks, "the server is back with other blocks")
