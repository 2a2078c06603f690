"""Who lies is found, and nobody else: checks against servers that do not exist, of blocks that are rotations."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swarm_client.adapters.snapshots import NOTHING
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm.links import Links
from swarm_client.swarm.swarm import BlockTraits
from swarm_client.transport.wire_tensor import WireTensor
from swarm_client.verification.checks import SampleCheck, SampledAnswer
from swarm_client.verification.references import kind_of, others, references, witnesses
from swarm_client.verification.verdict import CheckVerdict, Disagreement, Lie
from swarm_protocol.codecs.sizes import ANNOUNCED
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import Comparison
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.support import run, server_record

Lying = Callable[[torch.Tensor], torch.Tensor]
HIDDEN, TOKENS = 32, 12
WEIGHTS = torch.randn(8, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5


def true(span: Span, hidden: torch.Tensor, additions: torch.Tensor | None = None) -> torch.Tensor:
    for block in span:
        hidden = hidden + torch.tanh(hidden @ WEIGHTS[block])
        if additions is not None and block < additions.shape[2]:
            hidden = hidden + additions[:, :, block]
    return hidden


def honest(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def scaled(hidden: torch.Tensor) -> torch.Tensor:
    return 1.01 * hidden


def otherwise_rounded(hidden: torch.Tensor) -> torch.Tensor:
    """As a server of another kind computes."""
    return hidden * (1 + 2e-3 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)))


def rounded(hidden: torch.Tensor, codec: pb.Codec) -> torch.Tensor:
    """As it comes out of a link."""
    return WireTensor.of(hidden, codec).decode(hidden.shape, hidden.dtype)


def zeros(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden)


class Servers:
    """A swarm as a check sees it. ``lying``: what servers make of their answers, by peer id."""

    config, traits = ClientConfig(), BlockTraits()

    def __init__(self, *blocks: str, lying: dict[str, Lying] | None = None, gone: str = "") -> None:
        names = "abcdefgh"
        self.records = [server_record(name, span) for name, span in zip(names, blocks, strict=False)]
        self.lying, self.gone = lying or {}, gone
        self.asked: list[str] = []
        self.links = Links(self.config, self.server, 8)

    def compress(self, compression: str) -> None:
        """From now on, links have this codec, which all servers know."""
        self.records = [replace(record, codecs=ANNOUNCED) for record in self.records]
        self.links = Links(ClientConfig(compression=compression), self.server, 8)

    async def usable_servers(self) -> list[ServerRecord]:
        return self.records

    async def server(self, record: ServerRecord) -> Connection:
        return Connection(self, record)

    def hop(self, name: str, blocks: str | None = None) -> Hop:
        (record,) = (record for record in self.records if record.peer_id == name)
        return Hop(record, record.span if blocks is None else Span.parse(blocks))

    def sample(
        self,
        *names: str,
        lying: Lying = honest,
        by: str = "",
        is_first_chain: bool = True,
        additions: torch.Tensor | None = None,
    ) -> SampledAnswer:
        """Of a session through these servers; ``by`` lies in it."""
        hops = tuple(self.hop(name) for name in names)
        hidden = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
        to_first, *after_hops = codecs = self.links.codecs_of(hops)
        inputs = BlockInput(hidden, additions=additions)
        outputs = rounded(hidden, to_first)
        for hop, codec in zip(hops, after_hops, strict=True):
            outputs = true(hop.span, outputs, additions)
            outputs = rounded(lying(outputs) if hop.server.peer_id == by else outputs, codec)
        is_rounded = any(codec != pb.RAW for codec in codecs)
        return SampledAnswer(hops, codecs, inputs, outputs[0, -8:], NOTHING, is_first_chain, is_rounded)

    def verdict(self, sample: SampledAnswer, seed: int = 0) -> CheckVerdict:
        return run(SampleCheck(self, sample, False, random.Random(seed)).run())  # type: ignore[arg-type]


class Connection:
    def __init__(self, servers: Servers, record: ServerRecord) -> None:
        self._servers, self._record = servers, record

    async def stated(self, span: Span, inputs: BlockInput, hidden: WireTensor) -> tuple[WireTensor, pb.SignedStatement]:
        peer_id = self._record.peer_id
        self._servers.asked.append(peer_id)
        if peer_id == self._servers.gone:
            raise PeerUnavailable("gone")
        output = true(span, hidden.decode(inputs.hidden.shape, torch.float32))
        return WireTensor.of(self._servers.lying.get(peer_id, honest)(output)), pb.SignedStatement()


TWO_OF_EACH = ("0:4", "4:8", "0:4", "4:8")
THREE_OF_EACH = (*TWO_OF_EACH, "0:4", "4:8")


def test_honest_servers_pass() -> None:
    servers = Servers(*TWO_OF_EACH)
    assert servers.verdict(servers.sample("a", "b")) == CheckVerdict(frozenset("ab"))
    assert servers.asked == ["c", "d"]  # and nobody else


@pytest.mark.parametrize("compression", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("lie", [honest, zeros])
def test_what_links_round_is_no_lie(compression: str, lie: Lying) -> None:
    """Those who compute again are sent what the session's servers were sent, and their answers are rounded alike."""
    servers = Servers(*THREE_OF_EACH, lying={"a": lie} | dict.fromkeys("cdef", otherwise_rounded))
    servers.compress(compression)
    verdict = servers.verdict(servers.sample("a", "b", lying=lie, by="a"))
    assert verdict.distrusted == ({"a"} if lie is zeros else set())
    assert verdict.passed == (set() if lie is zeros else {"a", "b"})


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize(("old", "new"), [("int4", "raw"), ("int8", "raw"), ("raw", "int4")])
def test_links_that_are_measured_again_make_no_liars(names: str, old: str, new: str) -> None:
    """A session goes on with the codecs that it was opened with, and is checked with them."""
    servers = Servers(*(THREE_OF_EACH if len(names) > 1 else ("0:8",) * 3))
    servers.compress(old)
    sample = servers.sample(*names)
    servers.compress(new)
    assert servers.verdict(sample) == CheckVerdict(frozenset(names))


def in_four_bits(hidden: torch.Tensor) -> torch.Tensor:
    """As a server computes whose weights are so coarse."""
    return hidden + 0.3 * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(6))


def quantised(servers: Servers, **quants: str) -> Servers:
    """These servers announce a quantisation; their answers are not changed."""
    servers.records = [replace(record, quant=quants.get(record.peer_id, record.quant)) for record in servers.records]
    return servers


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("lie", [honest, zeros])
@pytest.mark.parametrize("names", ["a", "bc"])
def test_additions_are_made_between_what_servers_compute_again(compression: str, lie: Lying, names: str) -> None:
    servers = Servers("0:8", "0:2", "2:8", "0:8", "0:8")
    servers.compress(compression)
    by = names[0]
    servers.lying = {by: lie}
    sample = servers.sample(*names, lying=lie, by=by, additions=torch.randn(1, TOKENS, 3, HIDDEN))
    verdict = servers.verdict(sample)
    assert verdict.distrusted == (set() if lie is honest else {by})
    assert verdict.passed == (set(names) if lie is honest else set())


def test_four_bits_beside_others_are_no_lie() -> None:
    servers = quantised(Servers(*THREE_OF_EACH, lying={"a": in_four_bits}), a="int4")
    sample = servers.sample("a", "b", lying=in_four_bits, by="a")
    assert servers.verdict(sample) == CheckVerdict(frozenset("ab"))
    assert servers.verdict(quantised(servers, a="none").sample("a", "b", lying=in_four_bits, by="a")).lies


@pytest.mark.parametrize("quant", ["int4", "nf4", "fp8"])
def test_whoever_announces_four_bits_is_checked_too(quant: str) -> None:
    servers = quantised(Servers(*THREE_OF_EACH, lying={"a": zeros}), a=quant)
    (lie,) = servers.verdict(servers.sample("a", "b", lying=zeros, by="a")).lies
    assert (lie.server, set(lie.witnesses)) == ("a", {"c", "e"})


def test_four_bits_of_one_server_do_not_hide_what_another_makes_of_the_session() -> None:
    servers = quantised(Servers(*THREE_OF_EACH, lying={"a": in_four_bits, "b": scaled}), a="int4")
    sample = servers.sample("a", "b", lying=scaled, by="b")
    (lie,) = servers.verdict(sample).lies
    assert (lie.server, set(lie.witnesses)) == ("b", {"d", "f"})


def test_two_of_the_same_four_bits_are_held_to_what_others_are() -> None:
    servers = quantised(Servers(*THREE_OF_EACH), a="int4", c="int4", e="int4")
    assert servers.verdict(servers.sample("a", "b")) == CheckVerdict(frozenset("ab"))
    servers.lying = {"a": scaled}
    assert servers.verdict(servers.sample("a", "b", lying=scaled, by="a")).distrusted == {"a"}


def test_what_was_rounded_before_is_no_lie() -> None:
    """A hop was replaced, and its links round no longer: keys and values of what came before are the rounded ones."""
    servers = Servers("0:8", "0:8")
    sample = servers.sample("a", lying=lambda hidden: rounded(hidden, pb.INT4_BLOCKS), by="a", is_first_chain=False)
    assert servers.verdict(replace(sample, is_rounded=True)).passed == {"a"}
    assert not servers.verdict(sample).passed


@pytest.mark.parametrize("liar", "ab")
@pytest.mark.parametrize("lie", [scaled, zeros])
def test_a_liar_in_the_chain_is_shown_by_two_others(liar: str, lie: Lying) -> None:
    servers = Servers(*THREE_OF_EACH, lying={liar: lie})
    verdict = servers.verdict(servers.sample("a", "b", lying=lie, by=liar))
    (found,) = verdict.lies
    assert (found.server, str(found.span)) == (liar, "0:4" if liar == "a" else "4:8")
    assert set(found.witnesses) == ({"c", "e"} if liar == "a" else {"d", "f"})
    assert verdict.distrusted == {liar}


@pytest.mark.parametrize("liar", "cd")
def test_who_computes_again_and_lies_is_found_too(liar: str) -> None:
    servers = Servers(*TWO_OF_EACH, "0:8", lying={liar: scaled})
    for seed in range(10):  # chance may choose e to compute again, and then the chain passes
        verdict = servers.verdict(servers.sample("a", "b"), seed)
        assert verdict.distrusted <= {liar}
        if verdict.lies:
            break
    assert verdict.distrusted == {liar}


@pytest.mark.parametrize("liar", "bcd")
def test_the_one_of_several_that_lies_is_found(liar: str) -> None:
    servers = Servers("0:8", "0:3", "3:6", "6:8", "0:2", "2:5", "5:7", "7:8", lying={liar: scaled})
    (lie,) = servers.verdict(servers.sample("a")).lies
    assert (lie.server, lie.witnesses) == (liar, ("a", "e", "f", "g", "h"))
    assert lie.span == servers.hop(liar).span


def test_two_that_lie_together_outvote_nobody_where_three_others_are() -> None:
    servers = Servers(*["0:8"] * 6, lying={"a": scaled, "b": scaled})
    found = [servers.verdict(servers.sample("a", lying=scaled, by="a"), seed).distrusted for seed in range(60)]
    assert set().union(*found) == {"a", "b"}
    assert sum(distrusted == {"a", "b"} for distrusted in found) >= 10  # b was asked as well
    assert sum(not distrusted for distrusted in found) < 60 / 5 + 10  # b alone was asked


def test_two_of_three_that_lie_together_are_seen_to_differ_from_the_third() -> None:
    """Where the two were compared first. It cannot be told who is right: nobody is banned, and the user hears of it."""
    servers = Servers("0:8", "0:8", "0:8", lying={"a": scaled, "b": scaled})
    found = [servers.verdict(servers.sample("a", lying=scaled, by="a"), seed) for seed in range(100)]
    seen = [
        verdict for verdict in found if verdict.disagreements and set(verdict.disagreements[0].servers) == set("abc")
    ]
    assert seen and not any(verdict.lies for verdict in seen)


def test_two_honest_ones_are_not_outvoted_by_a_third_that_lies() -> None:
    servers = Servers("0:8", "0:8", "0:8", "0:8", lying={"c": scaled})
    found = {servers.verdict(servers.sample("a"), seed).distrusted for seed in range(60)}
    assert found == {frozenset(), frozenset("c")}


def at(servers: Servers, **hosts: str) -> Servers:
    """These servers are at public addresses."""
    servers.records = [replace(record, addresses=(f"{hosts[record.peer_id]}:1",)) for record in servers.records]
    return servers


def test_servers_of_one_address_do_not_check_one_another() -> None:
    """Among those of its kind; and if all of its kind are at its address, others do now and then."""
    servers = at(Servers(*["0:8"] * 4), a="8.0.0.1", b="8.0.0.1", c="8.0.0.2", d="8.0.0.3")
    assert chains(servers, "a") == {"c0:8", "d0:8"}
    quantised(servers, a="int8", b="int8")
    drawn = [others(servers.records, servers.hop("a"), {"a"}, random.Random(seed)) for seed in range(400)]
    share = sum(route[0].server.peer_id == "b" for route in drawn if route) / 400
    assert share == pytest.approx(0.75, abs=0.07)  # 3 standard deviations


def test_two_that_differ_are_not_judged() -> None:
    servers = Servers("0:8", "0:8", lying={"a": zeros})
    verdict = servers.verdict(servers.sample("a", lying=zeros, by="a"))
    assert verdict == CheckVerdict(disagreements=(Disagreement(("a", "b"), Span(0, 8)),))
    assert not verdict.distrusted


def test_blocks_of_one_server_are_not_checked_but_the_others_are() -> None:
    servers = Servers("0:4", "4:8", "0:4", "0:4", lying={"a": scaled})
    verdict = servers.verdict(servers.sample("a", "b", lying=scaled, by="a"))
    assert verdict.distrusted == {"a"}
    servers.lying = {"b": scaled}
    assert servers.verdict(servers.sample("a", "b", lying=scaled, by="b")) == CheckVerdict(
        frozenset("a"), unchecked=(Span(4, 8),)
    )
    alone = Servers("0:8", lying={"a": scaled})
    assert alone.verdict(alone.sample("a", lying=scaled, by="a")) == CheckVerdict(unchecked=(Span(0, 8),))
    assert alone.asked == []


def test_who_lies_in_sessions_only_contradicts_itself() -> None:
    servers = Servers("0:8", "0:8")
    sample = servers.sample("a", lying=scaled, by="a")
    assert servers.verdict(sample).lies == (Lie("a", Span(0, 8), ("b", "a")),)
    inherited = servers.sample("a", lying=scaled, by="a", is_first_chain=False)  # keys and values may be another's
    assert servers.verdict(inherited) == CheckVerdict()


def test_who_of_a_chain_lies_in_sessions_only_is_not_known() -> None:
    servers = Servers(*THREE_OF_EACH)
    verdict = servers.verdict(servers.sample("a", "b", lying=scaled, by="b"))
    assert verdict == CheckVerdict(suspects=frozenset("ab"))


def test_a_row_is_compared_where_it_is_no_padding() -> None:
    servers = Servers("0:8", "0:8")
    sample = servers.sample("a")
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    mask[0, :6] = 0
    sample.outputs[:2] = 0.0  # positions 4 and 5
    masked = replace(sample, inputs=BlockInput(sample.inputs.hidden, mask))
    assert servers.verdict(masked).passed == {"a"}
    assert servers.verdict(sample).lies


def chains(servers: Servers, *names: str) -> set[str]:
    """Who may compute again, by chance."""
    hops: Route = tuple(servers.hop(name) for name in names)
    routes = [references(servers.records, hops, random.Random(seed)) for seed in range(30)]
    return {" ".join(f"{hop.server.peer_id}{hop.span}" for part in route for hop in part.route) for route in routes}


def test_chance_chooses_who_computes_again() -> None:
    assert chains(Servers(*THREE_OF_EACH), "a", "b") == {"c0:4 d4:8", "c0:4 f4:8", "e0:4 d4:8", "e0:4 f4:8"}
    assert chains(Servers("0:8", "0:5", "3:8"), "a") == {"b0:5 c5:8"}
    assert chains(Servers("0:6", "4:8", "0:4"), "c", "b") == {"a0:4 b4:8"}


def test_servers_that_round_alike_come_first() -> None:
    servers = Servers("0:8", "0:8", "0:8")
    servers.records[1] = server_record("b", "0:8", quant="int8")
    hop = servers.hop("a")
    assert {others(servers.records, hop, {"a"}, random.Random(seed))[0].server.peer_id for seed in range(20)} == {"c"}  # type: ignore[index]
    assert others(servers.records, hop, set("abc"), random.Random(0)) is None


def test_some_witnesses_are_chosen_by_their_address() -> None:
    """Otherwise those of a rare kind would all be of one owner, whose servers are at one address here."""
    rare = [server_record(name, "0:8", quant="int8", addresses=("5.0.0.1:1",)) for name in "abc"]
    common = [server_record(name, "0:8", addresses=(f"5.0.0.{number}:1",)) for number, name in enumerate("def", 2)]
    chance = random.Random(1)
    first = [next(witnesses(rare[1:] + common, kind_of(rare[0]), rare[:1], chance)) for _ in range(400)]
    assert 70 < sum(server in common for server in first) < 130
    assert sorted(s.peer_id for s in witnesses(common, kind_of(rare[0]), rare, chance)) == list("def")


@pytest.mark.parametrize("lie", [honest, zeros])
async def test_outputs_are_compared_beside_the_event_loop(lie: Lying, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row of a large model takes seconds, and sessions go on meanwhile."""
    compare, loop = Comparison.of, asyncio.get_running_loop()
    num_compared = 0

    def slow(*tensors: torch.Tensor) -> Comparison:
        nonlocal num_compared
        others_go_on = threading.Event()
        loop.call_soon_threadsafe(others_go_on.set)
        assert others_go_on.wait(10.0), "the event loop waits for a comparison"
        num_compared += 1
        return compare(*tensors)

    monkeypatch.setattr(Comparison, "of", slow)
    servers = Servers(*THREE_OF_EACH)
    check = SampleCheck(servers, servers.sample("a", "b", lying=lie, by="b"), False, random.Random(0))  # type: ignore[arg-type]
    await check.run()
    assert num_compared
