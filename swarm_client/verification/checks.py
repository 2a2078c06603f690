"""One check: a row of a session is computed again by other servers, and if the outputs differ, others find out why."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, product

import torch

from swarm_client.adapters.snapshots import Snapshot
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.transport import unwatched
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_client.verification.references import Part, kind_of, others, references
from swarm_client.verification.verdict import Disagreement, Lie, Verdict
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import BadReply, PeerError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import MIN_POSITIONS, Bounds, Comparison, Kind
from swarm_protocol.wire.block_input import BlockInput

_ROUNDED = Kind("none", "float32"), Kind("compressed", "float32")  # what is sent as it is, and what a link rounds


@dataclass(frozen=True)
class Sample:
    """What a chain has answered to one row of a session.

    Attributes:
        hops: the chain; ``adapter``: what it adds to the blocks.
        codecs: in which hidden states went to the first of them, on from each to the next, and back to the client.
        inputs: hidden [1, positions, hidden_size], everything the row consists of.
        outputs: [last, hidden_size], of the last positions.
        is_first_chain: no server has computed this session before those of ``hops``, whose keys and values they
            might have.
        is_rounded: some link of the session has rounded, one of these or of those before.
    """

    hops: Route
    codecs: Sequence[pb.Codec]
    inputs: BlockInput
    outputs: torch.Tensor
    adapter: Snapshot
    is_first_chain: bool
    is_rounded: bool


@dataclass(frozen=True)
class _Answer:
    """What one server has made of some hidden states. ``inputs``, ``outputs``: [1, positions, hidden_size]."""

    hop: Hop
    inputs: WireTensor
    outputs: WireTensor


class Check:
    """Of one sample. Runs on the background loop."""

    def __init__(self, swarm: Swarm, sample: Sample, routed: bool, chance: random.Random) -> None:
        """``routed``: whether the model's blocks choose among experts."""
        self._swarm = swarm
        self._sample = sample
        self._routed = routed
        self._chance = chance
        self._context = Context.of(sample.inputs, sample.adapter)
        mask = sample.inputs.attention_mask
        self._attended = torch.ones(sample.inputs.hidden.shape[1], dtype=torch.bool) if mask is None else mask[0] != 0

    async def run(self) -> Verdict:
        """Raises PeerError if a server that computes again fails; it is to be left out, and the check made again."""
        sample, servers = self._sample, await self._swarm.usable_servers()
        parts = references(servers, sample.hops, self._chance)
        unchecked = tuple(part.hop.span for part in parts if part.others is None)
        num_compared = int(self._attended[-len(sample.outputs) :].sum())
        if len(unchecked) == len(parts) or num_compared < MIN_POSITIONS:
            return Verdict(unchecked=unchecked)
        bounds = self._bounds_of_chain(parts)
        # As in the session: rounded between the same blocks.
        to_first, *after_hops = sample.codecs
        hidden = WireTensor.of(sample.inputs.hidden, to_first).recoded(pb.RAW)
        answers: list[list[_Answer]] = []
        for part, codec in zip(parts, after_hops, strict=True):
            answers.append(await self._through(part.route, hidden))
            hidden = answers[-1][-1].outputs.recoded(codec).recoded(pb.RAW)
        num_last = len(sample.outputs)
        again, inputs = self._decoded(hidden)[-num_last:], sample.inputs.hidden[0, -num_last:]
        attended = self._attended[-num_last:]
        compared = Comparison.of(inputs[attended], sample.outputs[attended], again[attended])
        if compared.excess(bounds) >= 1:
            found = await self._find_out(parts, answers, servers)
            return found if found.lies or found.disagreements else self._contradiction(parts, answers)
        # What is wide for some would hide the lies of others.
        narrow = [not self._bounds_of(part).is_wide and bounds.is_wide for part in parts]
        found = await self._find_out(compress(parts, narrow), compress(answers, narrow), servers)
        if found.lies or found.disagreements:
            return found
        passed = frozenset(part.hop.server.peer_id for part in parts if part.others is not None)
        return Verdict(passed, unchecked=unchecked)

    async def _find_out(
        self, parts: Iterable[Part], answers: Iterable[Sequence[_Answer]], servers: Sequence[ServerRecord]
    ) -> Verdict:
        """Asks the servers of these parts, each by itself, and a third one where the second answers otherwise."""
        lies: list[Lie] = []
        disagreements: list[Disagreement] = []
        for part, again in zip(parts, answers, strict=True):
            if part.others is None:
                continue
            hop = part.hop
            own = await self._answer(hop, again[0].inputs)
            if self._agree(own, again):
                continue
            witnesses = tuple(answer.hop.server.peer_id for answer in again)
            third = others(servers, hop, {hop.server.peer_id, *witnesses}, self._chance)
            if third is None:
                disagreements.append(Disagreement((hop.server.peer_id, *witnesses), hop.span))
                continue
            judged = await self._through(third, again[0].inputs)
            judges = tuple(answer.hop.server.peer_id for answer in judged)
            with_second, with_first = self._agree_all(judged, again), self._agree(own, judged)
            if with_second == with_first:
                disagreements.append(Disagreement((hop.server.peer_id, *witnesses, *judges), hop.span))
            elif with_second:
                lies.append(Lie(hop.server.peer_id, hop.span, (*witnesses, *judges)))
            else:
                lies += await self._lies_among(again, hop, judges)
        return Verdict(lies=tuple(lies), disagreements=tuple(disagreements))

    async def _lies_among(self, again: Sequence[_Answer], hop: Hop, judges: tuple[str, ...]) -> list[Lie]:
        """Which of those that computed the hop's blocks again were wrong: its server is right."""
        lies = []
        for answer in again:
            own = answer if len(again) == 1 else await self._answer(Hop(hop.server, answer.hop.span), answer.inputs)
            if len(again) == 1 or not self._agree(own, [answer]):
                lies.append(Lie(answer.hop.server.peer_id, answer.hop.span, (hop.server.peer_id, *judges)))
        return lies

    def _contradiction(self, parts: Sequence[Part], answers: Sequence[Sequence[_Answer]]) -> Verdict:
        """Everybody agrees now: in the session one of the chain's servers has answered something else."""
        checked = [part.hop for part in parts]
        if not self._sample.is_first_chain:
            return Verdict(suspects=frozenset())
        if len(checked) == 1:
            witnesses = tuple(answer.hop.server.peer_id for answer in answers[0])
            peer_id = checked[0].server.peer_id
            return Verdict(lies=(Lie(peer_id, checked[0].span, (*witnesses, peer_id)),))
        return Verdict(suspects=frozenset(hop.server.peer_id for hop in checked))

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
            if self._sample.adapter.part(hop.span) is None:
                inputs = replace(self._sample.inputs, hidden=self._decoded(hidden)[None])
                outputs, _ = await server.stated(hop.span, inputs, hidden)
            else:
                outputs, _ = await server.forward(hop.span, hidden, self._context, unwatched)
            self._decoded(outputs)
        except BadReply as error:
            raise BadReply(str(error), hop.server.peer_id, hop.span) from None
        except PeerError as error:
            if not error.peer_id:
                error.peer_id = hop.server.peer_id
            raise
        return _Answer(hop, hidden, outputs)

    def _decoded(self, wire: WireTensor) -> torch.Tensor:
        """[positions, hidden_size]; raises BadReply."""
        hidden = self._sample.inputs.hidden
        return wire.decode(hidden.shape, hidden.dtype)[0]

    def _agree(self, own: _Answer, again: Sequence[_Answer]) -> bool:
        return self._agree_all([own], again)

    def _agree_all(self, one: Sequence[_Answer], other: Sequence[_Answer]) -> bool:
        """Whether two ways through the same blocks, from the same inputs, come out alike."""
        span = Span(one[0].hop.span.start, one[-1].hop.span.end)
        bounds = _widest(
            _pairs((answer.hop for answer in one), (answer.hop for answer in other)), len(span), self._routed
        )
        inputs, ours, theirs = (
            self._decoded(wire)[self._attended] for wire in (one[0].inputs, one[-1].outputs, other[-1].outputs)
        )
        return Comparison.of(inputs, ours, theirs).excess(bounds) < 1

    def _bounds_of_chain(self, parts: Sequence[Part]) -> Bounds:
        hops = self._sample.hops
        num_blocks = hops[-1].span.end - hops[0].span.start
        return max((self._bounds_of(part, num_blocks) for part in parts), key=lambda bounds: bounds.error)

    def _bounds_of(self, part: Part, num_blocks: int | None = None) -> Bounds:
        """For a part and what others make of it, if it changes the outputs of ``num_blocks``: its own by default."""
        pairs = _pairs([part.hop], part.route)
        if self._sample.is_rounded:
            pairs.append(_ROUNDED)
        return _widest(pairs, num_blocks or len(part.hop.span), self._routed)


def _pairs(ours: Iterable[Hop], theirs: Iterable[Hop]) -> list[tuple[Kind, Kind]]:
    """How two ways through the same blocks round."""
    return list(product({kind_of(hop.server) for hop in ours}, {kind_of(hop.server) for hop in theirs}))


def _widest(pairs: Iterable[tuple[Kind, Kind]], num_blocks: int, routed: bool) -> Bounds:
    return max((Bounds.of(*pair, num_blocks, routed) for pair in pairs), key=lambda bounds: bounds.error)
