"""One check: other servers compute a row of a session again; if outputs differ, further servers find out why."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, compress, pairwise, product

import torch

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import unwatched
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_client.verification.references import CheckedHop, kind_of, others, references
from swarm_client.verification.risk import SECOND_OPINIONS
from swarm_client.verification.verdict import CheckVerdict, Disagreement, Lie
from swarm_client.verification.votes import MOST_ANSWERS, majority
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import BadReply, PeerError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import MIN_POSITIONS, Bounds, Comparison, RoundingKind
from swarm_protocol.wire.block_input import BlockInput, unstacked

_ROUNDED = (
    RoundingKind("none", "float32"),
    RoundingKind("compressed", "float32"),
)  # an exact tensor, and one that a link rounds


@dataclass(frozen=True)
class SampledAnswer:
    """A chain's answer to one row of a session.

    Attributes:
        hops: the chain; ``adapter``: what it adds to the blocks.
        codecs: the codecs from the client to the first hop, between hops, and back to the client.
        inputs: hidden [1, positions, hidden_size], all inputs of the row.
        outputs: [last, hidden_size], the outputs of the last positions.
        is_first_chain: whether ``hops`` have computed all keys and values of the session; if not, other servers may be
            the ones that were wrong.
        is_rounded: whether a link of the session has rounded, one of these links or an earlier one.
    """

    hops: Route
    codecs: Sequence[pb.Codec]
    inputs: BlockInput
    outputs: torch.Tensor
    adapter: AdapterSnapshot
    is_first_chain: bool
    is_rounded: bool


@dataclass(frozen=True)
class _Answer:
    """One server's answer to some hidden states. ``inputs``, ``outputs``: [1, positions, hidden_size]."""

    hop: Hop
    inputs: WireTensor
    outputs: WireTensor


class SampleCheck:
    """The check of one sample. All coroutines run on the background loop, and all computation in threads.

    A long row of a large model is gigabytes of float64, and sessions go on meanwhile.
    """

    def __init__(self, swarm: Swarm, sample: SampledAnswer, routed: bool, chance: random.Random) -> None:
        """Prepare the check. ``routed``: the model's blocks choose among experts."""
        self._swarm = swarm
        self._sample = _cut_at_additions(sample)
        self._routed = routed
        self._chance = chance
        self._context = Context.of(sample.inputs, sample.adapter)
        mask = sample.inputs.attention_mask
        self._attended = torch.ones(sample.inputs.hidden.shape[1], dtype=torch.bool) if mask is None else mask[0] != 0

    async def run(self) -> CheckVerdict:
        """Run the check. Raise PeerError if a checking server fails: leave it out and check again."""
        sample, servers = self._sample, await self._swarm.usable_servers()
        parts = references(servers, sample.hops, self._chance)
        unchecked = tuple(part.hop.span for part in parts if part.others is None)
        num_compared = int(self._attended[-len(sample.outputs) :].sum())
        if len(unchecked) == len(parts) or num_compared < MIN_POSITIONS:
            return CheckVerdict(unchecked=unchecked)
        bounds = self._bounds_of_chain(parts)
        answers, hidden = await self._compute_again(parts)
        if (await asyncio.to_thread(self._compare, hidden)).excess(bounds) >= 1:  # 1: as far apart as the bounds allow
            found = await self._find_out(parts, answers, servers)
            return found if found.is_wrong else self._contradiction(parts, answers)
        # Bounds that are wide for some parts would hide the lies of others.
        narrow = [not self._bounds_of(part).is_wide and bounds.is_wide for part in parts]
        found = await self._find_out(compress(parts, narrow), compress(answers, narrow), servers)
        if not found.is_wrong and self._chance.random() < SECOND_OPINIONS:
            found = await self._second_opinion(parts, answers, servers)
        if found.is_wrong:
            return found
        passed = frozenset(part.hop.server.peer_id for part in parts if part.others is not None)
        return CheckVerdict(passed, unchecked=unchecked)

    async def _compute_again(self, parts: Sequence[CheckedHop]) -> tuple[list[list[_Answer]], WireTensor]:
        """Return other servers' answers for each part, and the last hidden states.

        The hidden states are rounded between the same blocks as in the session.
        """
        to_first, *after_hops = self._sample.codecs
        hidden, additions = await asyncio.to_thread(self._sent, to_first)
        answers: list[list[_Answer]] = []
        for part, codec in zip(parts, after_hops, strict=True):
            answers.append(await self._through(part.route, hidden))
            hidden, number = answers[-1][-1].outputs, part.hop.span.end - 1
            added = None if additions is None or number >= additions.shape[2] else additions[:, :, number]
            hidden = await asyncio.to_thread(self._linked, hidden, added, codec)
        return answers, hidden

    def _sent(self, codec: pb.Codec) -> tuple[WireTensor, torch.Tensor | None]:
        """Return the hidden states that the first server got, and the additions, as the first link rounds them."""
        sent = WireTensor.of(self._sample.inputs.stacked, codec)
        hidden, additions = unstacked(sent.decode(sent.header.shape, self._sample.inputs.hidden.dtype))
        return WireTensor.of(hidden), additions

    def _linked(self, hidden: WireTensor, added: torch.Tensor | None, codec: pb.Codec) -> WireTensor:
        """Return what a link in this codec leaves of the hidden states, after the client has added to them."""
        if added is not None:
            hidden = WireTensor.of(self._decoded(hidden)[None] + added)
        return hidden.recoded(codec).recoded(pb.RAW)  # sent here without a codec

    def _compare(self, hidden: WireTensor) -> Comparison:
        """Compare the session's outputs with those that were computed again, where no padding is."""
        sample, num_last = self._sample, len(self._sample.outputs)
        again, inputs = self._decoded(hidden)[-num_last:], sample.inputs.hidden[0, -num_last:]
        attended = self._attended[-num_last:]
        return Comparison.of(inputs[attended], sample.outputs[attended], again[attended])

    async def _find_out(
        self, parts: Iterable[CheckedHop], answers: Iterable[Sequence[_Answer]], servers: Sequence[ServerRecord]
    ) -> CheckVerdict:
        """Ask each part's server alone. If its answer differs from the second server's, ask further servers."""
        lies: list[Lie] = []
        disagreements: list[Disagreement] = []
        for part, again in zip(parts, answers, strict=True):
            if part.others is None:
                continue
            own = await self._answer(part.hop, again[0].inputs)
            if await asyncio.to_thread(self._agree_all, [own], again):
                continue
            found = await self._vote(part.hop, [[own], again], servers, least=2)
            lies += found.lies
            disagreements += found.disagreements
        return CheckVerdict(lies=tuple(lies), disagreements=tuple(disagreements))

    async def _second_opinion(
        self, parts: Sequence[CheckedHop], answers: Sequence[Sequence[_Answer]], servers: Sequence[ServerRecord]
    ) -> CheckVerdict:
        """Ask a third server although two agree, because they may lie together. Two against one ban no server here."""
        part, again = self._chance.choice(
            [(part, again) for part, again in zip(parts, answers, strict=True) if part.others is not None]
        )
        judges = _names(again)
        third = others(servers, part.hop, {part.hop.server.peer_id, *judges}, self._chance, judges)
        if third is None:
            return CheckVerdict()
        ways = [again, await self._through(third, again[0].inputs)]
        if await asyncio.to_thread(self._agree_all, *ways):
            return CheckVerdict()
        own = await self._answer(part.hop, again[0].inputs)
        return await self._vote(part.hop, [[own], *ways], servers, least=3)

    async def _vote(
        self, hop: Hop, ways: list[Sequence[_Answer]], servers: Sequence[ServerRecord], least: int
    ) -> CheckVerdict:
        """Return which servers are outvoted over the hop's blocks. Further servers are asked until three agree.

        ``ways``: answers of which some differ, first the answer of the hop's server. ``least``: see ``majority``.
        """
        found = await self._agreeing(hop, ways, servers, least)
        lies = await self._lies_against(found, hop, ways) if found else []
        if lies:
            return CheckVerdict(lies=tuple(lies))
        return CheckVerdict(
            disagreements=(Disagreement(tuple(name for way in ways for name in _names(way)), hop.span),)
        )

    async def _agreeing(
        self, hop: Hop, ways: list[Sequence[_Answer]], servers: Sequence[ServerRecord], least: int
    ) -> frozenset[int]:
        """Return the numbers of the ways that agree and outvote the others; empty if none do.

        Answers of further servers are added to ``ways`` until three agree.
        """
        hidden = ways[0][0].inputs
        while not (found := await asyncio.to_thread(self._majority, ways, 3)) and len(ways) < MOST_ANSWERS:
            asked = {name for way in ways for name in _names(way)}
            further = others(servers, hop, asked, self._chance, asked)
            if further is None:
                break
            ways.append(await self._through(further, hidden))
        return found or await asyncio.to_thread(self._majority, ways, least) or frozenset()

    async def _lies_against(self, found: frozenset[int], hop: Hop, ways: Sequence[Sequence[_Answer]]) -> list[Lie]:
        """Return which servers differ from those that agree."""
        witnesses = tuple(name for number in sorted(found) for name in _names(ways[number]))
        lies: list[Lie] = []
        for number, way in enumerate(ways):
            if number in found or await asyncio.to_thread(self._agrees_with_some, way, [ways[i] for i in found]):
                continue
            if len(way) == 1:
                lies.append(Lie(way[0].hop.server.peer_id, way[0].hop.span, witnesses))
            elif 0 in found:  # the hop's server is right, and can say which of several is wrong
                lies += await self._lies_among(way, hop, witnesses)
        return lies

    def _majority(self, ways: Sequence[Sequence[_Answer]], least: int) -> frozenset[int] | None:
        pairs = combinations(range(len(ways)), 2)
        return majority(len(ways), [(i, j) for i, j in pairs if self._agree_all(ways[i], ways[j])], least)

    async def _lies_among(self, way: Sequence[_Answer], hop: Hop, witnesses: tuple[str, ...]) -> list[Lie]:
        """Return which servers of a way over the hop's blocks were wrong, given that the hop's server is right."""
        lies = []
        for answer in way:
            own = await self._answer(Hop(hop.server, answer.hop.span), answer.inputs)
            if not await asyncio.to_thread(self._agree_all, [own], [answer]):
                lies.append(Lie(answer.hop.server.peer_id, answer.hop.span, witnesses))
        return lies

    def _contradiction(self, parts: Sequence[CheckedHop], answers: Sequence[Sequence[_Answer]]) -> CheckVerdict:
        """Return the verdict if all servers agree now, so that some server answered otherwise in the session."""
        checked = [part.hop for part in parts]
        if not self._sample.is_first_chain:
            return CheckVerdict(suspects=frozenset())
        if len({hop.server.peer_id for hop in checked}) == 1:
            witnesses = tuple(answer.hop.server.peer_id for answer in answers[0])
            peer_id = checked[0].server.peer_id
            return CheckVerdict(lies=(Lie(peer_id, checked[0].span, (*witnesses, peer_id)),))
        return CheckVerdict(suspects=frozenset(hop.server.peer_id for hop in checked))

    # ------------------------------------------------------------ asking, and comparing

    async def _through(self, route: Route, hidden: WireTensor) -> list[_Answer]:
        answers = []
        for hop in route:
            answers.append(await self._answer(hop, hidden))
            hidden = answers[-1].outputs
        return answers

    async def _answer(self, hop: Hop, hidden: WireTensor) -> _Answer:
        try:
            server = await self._swarm.server(hop.server)
            if self._sample.adapter.part(hop.span) is None:  # statements name no adapters
                inputs = replace(self._sample.inputs, hidden=(await asyncio.to_thread(self._decoded, hidden))[None])
                outputs, _ = await server.stated(hop.span, inputs, hidden)
            else:
                outputs, _ = await server.forward(hop.span, hidden, self._context, unwatched)
            await asyncio.to_thread(self._decoded, outputs)
        except BadReply as error:
            raise BadReply(str(error), hop.server.peer_id, hop.span) from None
        except PeerError as error:
            error.name_server(hop.server.peer_id)
            raise
        return _Answer(hop, hidden, outputs)

    def _decoded(self, wire: WireTensor) -> torch.Tensor:
        """Return [positions, hidden_size]; raise BadReply if the tensor is malformed."""
        hidden = self._sample.inputs.hidden
        return wire.decode(hidden.shape, hidden.dtype)[0]

    def _agree_all(self, one: Sequence[_Answer], other: Sequence[_Answer]) -> bool:
        """Return whether two ways through the same blocks, from the same inputs, agree within the bounds."""
        span = Span(one[0].hop.span.start, one[-1].hop.span.end)
        bounds = _widest(
            _pairs((answer.hop for answer in one), (answer.hop for answer in other)), len(span), self._routed
        )
        inputs, ours, theirs = (
            self._decoded(wire)[self._attended] for wire in (one[0].inputs, one[-1].outputs, other[-1].outputs)
        )
        return Comparison.of(inputs, ours, theirs).excess(bounds) < 1

    def _agrees_with_some(self, way: Sequence[_Answer], others: Iterable[Sequence[_Answer]]) -> bool:
        """Return whether a way agrees with one of the others. Bounds are wide, so it may differ from another one."""
        return any(self._agree_all(way, other) for other in others)

    def _bounds_of_chain(self, parts: Sequence[CheckedHop]) -> Bounds:
        hops = self._sample.hops
        num_blocks = hops[-1].span.end - hops[0].span.start
        return max((self._bounds_of(part, num_blocks) for part in parts), key=lambda bounds: bounds.error)

    def _bounds_of(self, part: CheckedHop, num_blocks: int | None = None) -> Bounds:
        """Return the bounds between a part and its reference, for outputs of ``num_blocks`` (default: the part's)."""
        pairs = _pairs([part.hop], part.route)
        if self._sample.is_rounded:
            pairs.append(_ROUNDED)
        return _widest(pairs, num_blocks or len(part.hop.span), self._routed)


def _cut_at_additions(sample: SampledAnswer) -> SampledAnswer:
    """Return the sample with hops that end where this client adds something, because passes have no additions."""
    num_added = 0 if sample.inputs.additions is None else sample.inputs.additions.shape[2]
    hops, codecs = [], [sample.codecs[0]]
    for hop, codec in zip(sample.hops, sample.codecs[1:], strict=True):
        start, end = hop.span.start, hop.span.end
        bounds = start, *range(start + 1, min(num_added + 1, end)), end
        hops += [Hop(hop.server, Span(*part)) for part in pairwise(bounds)]
        codecs += [*[pb.RAW] * (len(bounds) - 2), codec]
    return replace(sample, hops=tuple(hops), codecs=codecs)


def _names(way: Iterable[_Answer]) -> tuple[str, ...]:
    return tuple(answer.hop.server.peer_id for answer in way)


def _pairs(ours: Iterable[Hop], theirs: Iterable[Hop]) -> list[tuple[RoundingKind, RoundingKind]]:
    """Return the pairs of rounding kinds of two ways through the same blocks."""
    return list(product({kind_of(hop.server) for hop in ours}, {kind_of(hop.server) for hop in theirs}))


def _widest(pairs: Iterable[tuple[RoundingKind, RoundingKind]], num_blocks: int, routed: bool) -> Bounds:
    return max((Bounds.of(*pair, num_blocks, routed) for pair in pairs), key=lambda bounds: bounds.error)
