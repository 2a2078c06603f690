"""What a client measures of its links, and what follows from it; the servers are functions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm import links as module
from swarm_client.swarm.links import Links
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.codecs.sizes import ANNOUNCED
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.support import server_record, until
from tests.worlds.virtual_time import run_virtually

WIDTH = 128
ALL = Span(0, 8)
PROMPT = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(0))
RAW_BYTES_PER_S = WIDTH * 4 * 2000.0  # enough for 100 positions per second in a twentieth of the time


class FakeConnection:
    """To a server that triples what it gets."""

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self.num_measured = 0
        self.is_broken = False
        self.codecs: list[pb.Codec] = []

    async def bytes_per_s(self) -> float:
        self.num_measured += 1
        if not self.rate:
            raise PeerUnavailable("gone")
        return self.rate

    async def forward(self, _span: Span, hidden: WireTensor, *_: Any, codec: pb.Codec) -> tuple[WireTensor, bool]:
        self.codecs.append(hidden.header.codec)
        if self.is_broken:
            raise PeerUnavailable("gone")
        output = 3 * hidden.decode(hidden.header.shape, torch.float32)
        return WireTensor.of(output, codec), False


def record(name: str, blocks: str, **fields: Any) -> ServerRecord:
    given = {"addresses": ("192.0.2.1:1",), "codecs": ANNOUNCED, "forward_tokens_per_s": 100.0} | fields
    return server_record(name, blocks, **given)


def chain(**fields: Any) -> Route:
    records = [record("a", "0:4", **fields), record("b", "4:8", **fields)]
    return tuple(Hop(server, server.span) for server in records)


def links(rates: dict[str, float], **config: Any) -> tuple[Links, dict[str, FakeConnection]]:
    connections = {name: FakeConnection(rate) for name, rate in rates.items()}

    async def connection(server: ServerRecord) -> Any:
        return connections[server.peer_id]

    return Links(ClientConfig(**config), connection, len(ALL)), connections


def error_of(sample: torch.Tensor, codec: pb.Codec = pb.INT8_BLOCKS) -> float:
    """Through the chain, which triples it twice."""
    hidden = sample
    for factor in (1, 3, 3):
        hidden = WireTensor.of(factor * hidden, codec).decode(hidden.shape, hidden.dtype)
    return float((hidden / 9 - sample).norm() / sample.norm())


async def prepared(
    route: Route, rates: dict[str, float], before: Callable[[Links], None] = lambda _: None, **config: Any
) -> tuple[Links, dict[str, FakeConnection]]:
    """Links that have seen a prompt, and measured what they want to know of the route."""
    found, connections = links(rates, **config)
    found.see(BlockInput(PROMPT), ALL)
    before(found)
    await found.prepare([route])
    return found, connections


async def test_fast_links_stay_raw_and_no_error_is_measured() -> None:
    found, connections = await prepared(chain(), {"a": 1e9, "b": 1e9})
    assert found.codecs_of(chain()) == [pb.RAW] * 3
    assert found.codec_of_pass(chain()) == pb.RAW
    assert found.errors == {} and connections["a"].codecs == []


async def test_each_link_has_its_own_codec() -> None:
    """The first server's line is at a third of what raw takes, the servers' among themselves at half of it."""
    route = chain(network_tokens_per_s=1000.0)
    found, connections = await prepared(route, {"a": RAW_BYTES_PER_S / 3, "b": 1e9})
    assert found.codecs_of(route) == [pb.INT8_BLOCKS, pb.BFLOAT16_ELEMENTS, pb.RAW]
    assert found.codec_of_pass(route) == pb.INT8_BLOCKS
    assert sorted(connections["b"].codecs) == [pb.RAW, pb.INT8_BLOCKS, pb.INT4_BLOCKS]


@pytest.mark.parametrize(
    ("bound", "codec"), [(0.5, pb.INT4_BLOCKS), (0.05, pb.INT8_BLOCKS), (0.0, pb.BFLOAT16_ELEMENTS)]
)
async def test_a_codec_beyond_the_bound_is_not_taken(bound: float, codec: pb.Codec) -> None:
    """The sample's error is what the codecs do to it on three links, one after the other."""
    route = chain()
    found, _ = await prepared(route, {"a": 1e4, "b": 1e4}, compression_error=bound)
    assert found.codec(None, route[0].server) == codec
    for name, wire in (("int8", pb.INT8_BLOCKS), ("int4", pb.INT4_BLOCKS)):
        assert found.errors[name] == pytest.approx(error_of(PROMPT[:1, :16], wire), rel=1e-4)


async def test_the_error_is_that_after_the_norm() -> None:
    def with_norm(found: Links) -> None:
        found.finish = lambda hidden: hidden * torch.nn.functional.one_hot(torch.tensor(5), WIDTH)

    found, _ = await prepared(chain(), {"a": 1e4, "b": 1e4}, with_norm)
    plain, _ = await prepared(chain(), {"a": 1e4, "b": 1e4})
    assert found.errors["int4"] != pytest.approx(plain.errors["int4"], rel=1e-3)


async def test_an_older_server_is_sent_what_it_knows() -> None:
    route = chain(codecs=(), network_tokens_per_s=1.0)
    for config in ({}, {"compression": "int4"}):
        found, connections = await prepared(route, {"a": 1e4, "b": 1e4}, **config)
        assert found.codecs_of(route) == [pb.INT8_BLOCKS] * 3 and found.codec_of_pass(route) == pb.INT8_BLOCKS
        assert pb.INT4_BLOCKS not in connections["a"].codecs
    newer = Hop(record("b", "4:8", network_tokens_per_s=1.0), Span(4, 8))
    found, _ = await prepared(route, {"a": 1e4, "b": 1e4}, compression="bf16")
    assert found.codecs_of((route[0], newer)) == [pb.RAW, pb.RAW, pb.BFLOAT16_ELEMENTS]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("none", pb.RAW),
        ("bf16", pb.BFLOAT16_ELEMENTS),
        ("int4", pb.INT4_BLOCKS),
    ],
)
async def test_a_codec_that_is_forced_is_taken_whatever_its_error(name: str, codec: pb.Codec) -> None:
    found, connections = await prepared(chain(), {"a": 1e4, "b": 1e4}, compression=name)
    assert found.codecs_of(chain()) == [codec] * 3 and found.codec_of_pass(chain()) == codec
    assert connections["a"].codecs == [] and found.errors == {}


async def test_on_this_machine_nothing_is_measured() -> None:
    route = chain(addresses=("127.0.0.1:5",), network_tokens_per_s=0.001)
    found, connections = await prepared(route, {"a": 1e4, "b": 1e4})
    assert found.codecs_of(route) == [pb.RAW] * 3 and connections["a"].num_measured == 0


@pytest.mark.parametrize(("rate", "codec"), [(1e4, pb.INT4_BLOCKS), (1e9, pb.RAW), (0.0, pb.RAW)])
async def test_who_cannot_be_measured_is_as_slow_as_others_and_is_asked_later(rate: float, codec: pb.Codec) -> None:
    """All links of a client are over its own line. If none can be measured, it is taken for fast."""
    found, connections = await prepared(chain(), {"a": 0.0, "b": rate})
    for _ in range(2):
        await found.prepare([chain()])
    assert found.codec(None, chain()[0].server) == codec
    assert connections["a"].num_measured == connections["b"].num_measured == 1


class Slow(FakeConnection):
    """It takes a second to measure; never two at a time."""

    under_way = 0

    async def bytes_per_s(self) -> float:
        assert not Slow.under_way
        Slow.under_way += 1
        try:
            await asyncio.sleep(1.0)
        finally:
            Slow.under_way -= 1
        return await super().bytes_per_s()


@pytest.mark.run_by(function=run_virtually)
async def test_who_comes_while_a_rate_is_measured_waits_for_it_too() -> None:
    found, connections = links({"a": 1e4, "b": 1e4})
    connections.update(a=Slow(1e4), b=Slow(1e4))
    found.see(BlockInput(PROMPT), ALL)
    first = asyncio.ensure_future(found.prepare([chain()]))
    await asyncio.sleep(0.5)
    await found.prepare([chain()])
    assert found.codec(None, chain()[0].server) == found.codec(chain()[1].server, None) == pb.INT4_BLOCKS
    await first
    assert connections["a"].num_measured == connections["b"].num_measured == 1


@pytest.mark.run_by(function=run_virtually)
async def test_a_replacement_is_as_slow_as_others_until_it_is_measured() -> None:
    found, connections = await prepared(chain(), {"a": 1e4, "b": 1e4, "c": 1e9})
    replacement = record("c", "0:4")
    found.measure([replacement])
    assert found.codec(None, replacement) == found.codec(replacement, None) == pb.INT4_BLOCKS
    await asyncio.sleep(1.0)
    assert connections["c"].num_measured == 1
    await found.prepare([chain()])
    assert found.codec(None, replacement) == pb.RAW


async def test_an_error_that_cannot_be_measured_is_not_measured_again_at_once() -> None:
    found, connections = links({"a": 1e4, "b": 1e4})
    found.see(BlockInput(PROMPT), ALL)
    connections["b"].is_broken = True
    await asyncio.gather(*(found.prepare([chain()]) for _ in range(3)))
    await found.prepare([chain()])
    assert found.errors == {} and sorted(connections["a"].codecs) == [pb.RAW, pb.INT8_BLOCKS, pb.INT4_BLOCKS]


@pytest.mark.run_by(function=run_virtually)
@pytest.mark.parametrize(("lengths", "expected"), [((1, 12, 9), 12), ((8,), 8), ((9, 40, 12), 16)])
async def test_the_longest_prompt_so_far_is_the_sample(lengths: tuple[int, ...], expected: int) -> None:
    found, _ = links({"a": 1e4, "b": 1e4})
    found.see(BlockInput(PROMPT), ALL)  # of which nothing is kept: the width is another
    for length in lengths:
        found.see(BlockInput(PROMPT[:, :length, :-1]), ALL)
    await found.prepare([chain()])
    assert found.errors["int8"] == pytest.approx(error_of(PROMPT[:1, :expected, :-1]), rel=1e-3)


@pytest.mark.run_by(function=run_virtually)
async def test_a_prompt_of_a_few_positions_is_no_sample() -> None:
    """The first ones are unlike all others."""
    found, connections = links({"a": 1e4, "b": 1e4})
    found.see(BlockInput(PROMPT[:, :7]), ALL)
    await found.prepare([chain()])
    assert found.errors == {} and connections["a"].codecs == []
    assert found.codec(None, chain()[0].server) == pb.BFLOAT16_ELEMENTS
    found.see(BlockInput(PROMPT), ALL)
    await found.prepare([chain()])
    assert found.codec(None, chain()[0].server) == pb.INT4_BLOCKS


@pytest.mark.run_by(function=run_virtually)
@pytest.mark.parametrize("past", [0, 3])
async def test_padding_is_no_sample(past: int) -> None:
    mask = torch.ones(2, past + 40, dtype=torch.long)
    mask[0, : past + 33], mask[1, : past + 20], mask[:, :past] = 0, 0, 1
    hidden = PROMPT.clone()
    hidden[0, :33] = hidden[1, :20] = 0.0
    found, _ = links({"a": 1e4, "b": 1e4})
    found.see(BlockInput(hidden, mask), ALL)
    await found.prepare([chain()])
    assert found.errors["int8"] == pytest.approx(error_of(PROMPT[1:, 20:36]), rel=1e-3)


@pytest.mark.run_by(function=run_virtually)
async def test_a_part_of_the_blocks_says_nothing_of_the_model() -> None:
    found, connections = links({"a": 1e4, "b": 1e4})
    found.see(BlockInput(PROMPT), Span(4, 8))
    await found.prepare([chain()])
    found.see(BlockInput(PROMPT), ALL)
    await found.prepare([chain()[:1]])
    assert found.errors == {} and connections["a"].codecs == []
    await found.prepare([chain()])
    assert found.errors.keys() == {"int8", "int4"}


class SlowLine(FakeConnection):
    """Over a line that all servers share, each direction for itself; ``broken``: a codec in which nothing comes."""

    def __init__(self, bytes_per_s: float, line: tuple[asyncio.Lock, asyncio.Lock], broken: pb.Codec | None) -> None:
        super().__init__(bytes_per_s)
        self.line, self.broken = line, broken

    async def forward(self, span: Span, hidden: WireTensor, *_: Any, codec: pb.Codec) -> tuple[WireTensor, bool]:
        if codec == self.broken:
            raise PeerUnavailable("gone")
        await self._carry(self.line[0], hidden)
        output, kept = await super().forward(span, hidden, codec=codec)
        await self._carry(self.line[1], output)
        return output, kept

    async def _carry(self, way: asyncio.Lock, hidden: WireTensor) -> None:
        for _ in range(0, hidden.header.size_bytes, 32768):
            async with way:
                await asyncio.sleep(32768 / self.rate)


def errors_over(mbit: float, width: int, num_hops: int, broken: pb.Codec | None = None) -> tuple[Links, float]:
    """What is known of a model after its first prompt, and for how many seconds that waited."""

    async def story() -> tuple[Links, float]:
        names = "abcdefgh"[:num_hops]
        found, connections = links(dict.fromkeys(names, 1.0), compression_error=0.5)
        line = asyncio.Lock(), asyncio.Lock()
        connections.update({name: SlowLine(mbit * 125e3, line, broken) for name in names})
        per_hop = len(ALL) // num_hops
        records = [record(name, f"{per_hop * n}:{per_hop * (n + 1)}") for n, name in enumerate(names)]
        found.see(BlockInput(torch.randn(1, 16, width)), ALL)
        await found.prepare([tuple(Hop(server, server.span) for server in records)])
        return found, asyncio.get_running_loop().time()

    return run_virtually(story())


@pytest.mark.parametrize(
    ("mbit", "width", "num_hops"),
    [(1, 4096, 2), (1, 4096, 4), (1, 8192, 2), (2, 8192, 4), (10, 8192, 4), (0.5, 8192, 8)],
)
def test_errors_are_measured_over_slow_lines_too(mbit: float, width: int, num_hops: int) -> None:
    found, seconds = errors_over(mbit, width, num_hops)
    assert found.errors.keys() == {"int8", "int4"}
    assert seconds < 12 or mbit < 1


def test_what_could_be_measured_is_kept() -> None:
    found, _ = errors_over(10, 1024, 2, broken=pb.INT8_BLOCKS)
    assert found.errors.keys() == {"int4"}
    assert errors_over(10, 1024, 2, broken=pb.RAW)[0].errors == {}


async def test_links_that_take_a_while_are_counted() -> None:
    """At 25.6 kB/s raw positions of 512 bytes take 20 ms each; the servers among themselves are as slow."""
    route = chain(network_tokens_per_s=50.0, forward_tokens_per_s=1.0, tokens_per_s=1.0)
    found, _ = await prepared(route, {"a": 25600.0, "b": 25600.0})
    assert found.codecs_of(route) == [pb.RAW] * 3
    assert found.num_slow(route, 1) == found.num_slow(route, 2) == 0
    assert found.num_slow(route, 3) == 2 and found.num_slow(route[1:], 3) == 1
    fast = chain()
    assert found.num_slow(fast, 3) == 1  # to the first: of the other nobody has said anything
    raw, _ = await prepared(route, {"a": 25600.0, "b": 25600.0}, compression="raw")
    assert raw.num_slow(route, 3) == 2


async def test_a_rate_is_measured_anew_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    time_s = 1000.0
    monkeypatch.setattr(module, "now_s", lambda: time_s)
    found, connections = await prepared(chain(), {"a": 1e4, "b": 1e9})
    assert connections["b"].num_measured == 1 and found.codec(chain()[1].server, None) == pb.RAW
    connections["b"].rate = 1e4
    time_s += 200.0
    await found.prepare([chain()])
    assert connections["b"].num_measured == 1
    time_s += 200.0
    await found.prepare([chain()])
    assert found.codec(chain()[1].server, None) == pb.RAW
    await until(lambda: connections["b"].num_measured == 2)
    await found.prepare([chain()])
    assert found.codec(chain()[1].server, None) == pb.INT4_BLOCKS


async def test_what_is_known_of_a_line() -> None:
    a, b = (hop.server for hop in chain())
    found, _ = await prepared(chain(), {"a": 1e6, "b": 1e7})
    assert (found.bytes_per_s(None, a), found.bytes_per_s(b, None)) == (1e6, 1e7)
    assert found.bytes_per_s(a, b) is None
    told = record("b", "4:8", network_tokens_per_s=100.0)
    assert found.bytes_per_s(a, told) == 100 * WIDTH * 4
    here = record("c", "0:4", addresses=("127.0.0.1:5",))
    assert found.bytes_per_s(None, here) == found.bytes_per_s(here, here) == math.inf
