"""What a client adds to blocks: snapshots in parts, sums of gradients, and how servers are given them."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarm_client.adapters.snapshots import NOTHING, ActiveAdapter, AdapterPart, AdapterSnapshot, AdapterUploader
from swarm_client.routing.routing import Wanted, usable
from swarm_protocol.dht.records import SwarmView
from swarm_protocol.errors import CacheMiss
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank, Prompt, adapter_key
from tests.unit.support import run, server_record

SALT = bytes(range(32))


def low_rank(block: int, dropout: float = 0.0) -> LowRank:
    return LowRank(block, "q_proj", 2.0, torch.randn(3, 4), torch.randn(5, 3), dropout)


def adapter() -> Adapter:
    return Adapter(SALT, (low_rank(1), low_rank(3)), (Prompt(0, torch.randn(2, 4)), Prompt(3, torch.randn(2, 4))))


def test_a_part_is_what_lies_in_the_blocks():
    snapshot = AdapterSnapshot(ActiveAdapter(adapter()))
    part = snapshot.part(Span(2, 4))
    assert part.shapes == ((3, 4), (5, 3), (2, 4))
    assert part.name.key == adapter_key(part.data)
    found = Adapter.parse(part.data)
    assert [part.block for part in (*found.low_rank, *found.prompts)] == [3, 3]
    assert snapshot.part(Span(2, 4)) is part and snapshot.part(Span(2, 3)) is None
    assert NOTHING.part(Span(0, 4)) is None


def test_a_snapshot_does_not_change_with_the_parameters():
    added = ActiveAdapter(adapter())
    before, same = added.snapshot().part(Span(0, 4)), added.snapshot().part(Span(0, 4))
    snapshot = added.snapshot()
    added.adapter.low_rank[0].a.data += 1  # as some optimizers do, unseen by autograd
    assert snapshot.part(Span(0, 4)).name == before.name == same.name
    assert added.snapshot().part(Span(0, 4)).name != before.name


def test_a_name_is_all_there_is_of_an_adapter_of_servers():
    part = AdapterSnapshot(ActiveAdapter(name="polite")).part(Span(0, 2))
    assert part.name == pb.AdapterName(name="polite") and part.data is None and part.shapes == ()


def test_dropping_is_for_training():
    dropping = Adapter(SALT, (low_rank(0), low_rank(1, dropout=0.1)))
    assert ActiveAdapter(dropping, training=True).drops
    assert not ActiveAdapter(dropping).drops
    assert not ActiveAdapter(dropping, training=True).over(Span(0, 1)).drops


def test_where_the_gradients_begin():
    snapshot = AdapterSnapshot(ActiveAdapter(Adapter(SALT, (low_rank(3),))))
    assert [snapshot.begins(span) for span in (Span(0, 6), Span(3, 6), Span(4, 6))] == [3, 3, 6]


def test_sums_of_gradients():
    whole = adapter()
    sums = AdapterSnapshot(ActiveAdapter(whole)).sums(Span(0, 4))
    for scale in (1, 2):  # two micro-batches, through different chains
        for span in ([Span(2, 4), Span(0, 2)], [Span(1, 4), Span(0, 1)])[scale - 1]:
            sums.add(span, [scale * tensor for tensor in whole.over(span).tensors])
    for total, tensor in zip(sums.tensors, whole.tensors, strict=True):
        torch.testing.assert_close(total, 3 * tensor)


# ------------------------------------------------------------ giving


class Forgetful:
    """A server that forgets what it was given so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.has: set[bytes] = set()
        self.puts: list[bytes] = []

    async def put(self, data: bytes, _span: Span) -> None:
        await asyncio.sleep(0)
        self.puts.append(data)
        self.has.add(data)

    async def request(self, name: pb.AdapterName | None) -> str:
        await asyncio.sleep(0)
        if self.times and self.has:
            self.times -= 1
            self.has.clear()
        if name is not None and name.key not in self.has:
            raise CacheMiss("gone", "peer")
        return "done"


def part(text: bytes = b"data") -> AdapterPart:
    return AdapterPart(pb.AdapterName(key=text), text)


@pytest.mark.parametrize("times", [0, 1, 3])
async def test_a_cache_miss_uploads_it_again(times):
    server = Forgetful(times)
    uploader = AdapterUploader(server.put)
    for _ in range(3):
        assert await uploader.use(part(), Span(0, 1), server.request) == "done"
    assert server.puts == [b"data"] * (1 + times)


def test_a_server_that_forgets_everything_is_given_up():
    server = Forgetful(1000)
    with pytest.raises(CacheMiss):
        run(AdapterUploader(server.put).use(part(), Span(0, 1), server.request))
    assert 2 <= len(server.puts) <= 5


async def test_requests_at_once_share_an_upload():
    server = Forgetful(0)
    uploader = AdapterUploader(server.put)
    await asyncio.gather(*(uploader.use(part(), Span(0, 1), server.request) for _ in range(8)))
    assert server.puts == [b"data"]


def test_nothing_to_give():
    server = Forgetful(0)
    assert run(AdapterUploader(server.put).use(None, Span(0, 1), server.request)) == "done"
    assert server.puts == []


def test_only_servers_with_the_adapter_are_used():
    view = SwarmView((server_record("one", adapters=("polite", "terse")), server_record("two")))
    kept, left_out = usable(view, Wanted("revision", 8, adapter="terse"))
    assert [server.peer_id for server in kept.servers] == ["one"]
    assert left_out == ["1 server without adapter terse"]
