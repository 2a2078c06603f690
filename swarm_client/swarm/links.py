"""A client's measurements of the links of its chains, and the choice of a codec for hidden states on each link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from math import inf

import torch

from swarm_client.core.background import now_s
from swarm_client.core.config import ClientConfig
from swarm_client.routing.compression import (
    Link,
    client_link,
    codec_for,
    forced,
    is_on_this_machine,
    known_to,
    server_link,
    to_measure,
    within,
)
from swarm_client.routing.pipelining import PipelineStage
from swarm_client.routing.routing import Hop, Route
from swarm_client.swarm.watchdog import SLOW_BYTES_PER_S
from swarm_client.transport.transport import ServerConnection, unwatched
from swarm_client.transport.wire_tensor import Context, WireTensor
from swarm_protocol.codecs.sizes import CODEC_NAMES, CODECS, LADDER, encoded_bytes
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import SwarmError
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput

_logger = logging.getLogger(__name__)
_SAMPLE_POSITIONS = 16  # prompt positions in the sample that measures codec errors
_LEAST_SAMPLE = 8  # a shorter prompt is no sample: the hidden states of first positions are unlike all others
_LEAST_POSITIONS = 4  # over slow links, only part of the sample is sent, but at least so many positions
_ERRORS_S = 10.0  # the longest time for which sending the sample may delay a prompt, unless the line is even slower
_MEASURE_TIMEOUT_S = 20.0  # the time limit of a measurement, without the expected transfer time
_SLOW_S = 0.05  # a link on which a prompt takes longer is a stage of the pipeline
_AGAIN_AFTER_S = 300.0  # the age at which a link's rate is measured again
_RETRY_AFTER_S = 30.0  # the wait after a failed measurement

Connection = Callable[[ServerRecord], Awaitable[ServerConnection]]


class Links:
    """The links of one client.

    The rates of links to servers on other machines are measured. An unknown rate, such as that of a new server, is
    assumed to be the lowest known one. If a link is slow and compression is ``auto``, the errors of codecs are measured
    once per model: a prompt's first positions are computed with and without each codec on all links of the chain.

    Attributes:
        errors: the relative error of the last hidden state, by codec; empty until it is measured.
        finish: the model's function between the last hidden state and the head (the norm), applied before measuring.
    """

    def __init__(self, config: ClientConfig, connection: Connection, num_blocks: int) -> None:
        """Start without measurements. ``num_blocks``: the number of blocks of the model."""
        self._compression, self._bound = config.compression, config.compression_error
        self._connection = connection
        self._all_blocks = Span(0, num_blocks)
        self._bytes_per_s: dict[str, float] = {}  # keys: peer ids
        self._due_s: dict[str, float] = {}  # the time of the next measurement
        self._tasks: dict[str, asyncio.Task[None]] = {}  # running measurements
        self._sample: torch.Tensor | None = None  # [1, positions, width]
        self._width, self._item_bytes = 0, 4  # of hidden states; a width of 0 is unknown, before the first input
        self._chosen: dict[tuple[str, str], pb.Codec] = {}
        self._rating = asyncio.Lock()  # parallel measurements would slow each other down
        self._measuring = asyncio.Lock()
        self._errors_due_s = -inf  # set into the future when a measurement has failed
        self.errors: dict[str, float] = {}
        self.finish: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden

    def finish_with(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Set the model's function between the last hidden state and the head."""
        self.finish = finish

    def see(self, inputs: BlockInput, blocks: Span) -> None:
        """Note the inputs of these blocks. If these are all blocks of the model, a prompt may become the sample."""
        hidden = inputs.hidden
        if hidden.shape[-1] != self._width or hidden.element_size() != self._item_bytes:
            self._width, self._item_bytes, self._sample = hidden.shape[-1], hidden.element_size(), None
            self._chosen.clear()
        num_before = _LEAST_SAMPLE - 1 if self._sample is None else self._sample.shape[1]
        if self.errors or blocks != self._all_blocks or min(hidden.shape[1], _SAMPLE_POSITIONS) <= num_before:
            return
        sample = _sample_of(inputs)
        if sample.shape[1] > num_before:
            self._sample = sample

    async def prepare(self, routes: Iterable[Route], pushes: bool = True) -> None:
        """Measure what is unknown about these chains. ``pushes``: middle servers exchange no data with the client."""
        if not self._width:
            return
        ends = {
            hop.server.peer_id: hop.server for route in routes for hop in (route[:1] + route[-1:] if pushes else route)
        }
        self.measure(ends.values())
        unknown = [self._tasks[peer_id] for peer_id in ends if peer_id in self._tasks.keys() - self._bytes_per_s.keys()]
        if unknown:  # no matter which caller began; a link that is measured again is not waited for
            await asyncio.wait(unknown, timeout=_MEASURE_TIMEOUT_S)  # measurements run one after the other
        self._chosen.clear()  # the new rates may lead to other codecs
        for route in routes:
            await self._measure_errors_if_needed(route)

    def measure(self, servers: Iterable[ServerRecord]) -> None:
        """Start to measure the links to servers that will exchange data with the client, if the time has come."""
        for server in servers:
            peer_id = server.peer_id
            is_due = not is_on_this_machine(server) and now_s() >= self._due_s.get(peer_id, -inf)
            if self._width and peer_id not in self._tasks and is_due:
                self._tasks[peer_id] = task = asyncio.ensure_future(self._measure_rate(server))
                task.add_done_callback(lambda _, peer_id=peer_id: self._tasks.pop(peer_id))  # type: ignore[misc]

    def codec(self, one: ServerRecord | None, other: ServerRecord | None) -> pb.Codec:
        """Return the codec for data from ``one`` to ``other``; None stands for this client."""
        key = ("" if one is None else one.peer_id, "" if other is None else other.peer_id)
        if key not in self._chosen:
            self._chosen[key] = CODECS[self._choose(one, other)]
        return self._chosen[key]

    def codec_of_pass(self, route: Route) -> pb.Codec:
        """Return the codec of hidden states that go from the client to each of these servers and back."""
        names = [self._choose(None, hop.server) for hop in route]
        return CODECS[forced(max(names, key=LADDER.index), known_to(*(hop.server for hop in route)))]

    def codecs_of(self, route: Route) -> list[pb.Codec]:
        """Return the codecs from the client to the first server, between servers, and back to the client."""
        return [self.codec(one, other) for one, other in _ways(route)]

    def bytes_per_s(self, one: ServerRecord | None, other: ServerRecord | None) -> float | None:
        """Return the rate from one peer to another (None: this client); infinite on one machine; None if unknown."""
        rate = self._link(one, other).bytes_per_s
        is_here = all(server is None or is_on_this_machine(server) for server in (one, other))
        return rate if rate < inf or is_here else None

    def num_slow(self, hops: Sequence[Hop], num_positions: int) -> int:
        """Return how many links, from the client to the last server, take long to carry so many positions."""
        if num_positions == 1 or not self._width:
            return 0
        ways = [*_ways(hops)][:-1]  # without the way back, on which only the last positions travel
        return sum(self._send_s(one, other) * num_positions > _SLOW_S for one, other in ways)

    def stages(self, route: Route) -> dict[str, PipelineStage]:
        """Return the pipeline stages of a step's rows: client to first server, between servers, and back. The names of
        the first and last stage are the same for all routes, because all lanes share the client's line."""
        peers = [hop.server.peer_id for hop in route]
        names = ["to the swarm", *(f"{one} to {other}" for one, other in pairwise(peers)), "from the swarm"]
        return {
            name: PipelineStage(0.0, self._send_s(one, other))
            for name, (one, other) in zip(names, _ways(route), strict=True)
        }

    def _send_s(self, one: ServerRecord | None, other: ServerRecord | None) -> float:
        """Return the seconds that sending one position takes; 0 if the rate is unknown."""
        name = CODEC_NAMES[self.codec(one, other)]
        return encoded_bytes(name, 1, self._width, self._item_bytes) / self._link(one, other).bytes_per_s

    def _choose(self, one: ServerRecord | None, other: ServerRecord | None) -> str:
        if self._compression != "auto":
            return forced(self._compression, known_to(*(server for server in (one, other) if server is not None)))
        if not self._width:
            return "raw"
        return codec_for(self._link(one, other), self._width, self._item_bytes, within(self.errors, self._bound))

    def _link(self, one: ServerRecord | None, other: ServerRecord | None) -> Link:
        if one is not None and other is not None:
            return server_link(one, other, self._width)
        server = one or other
        assert server is not None, "the client has no link to itself"
        slowest = min(self._bytes_per_s.values(), default=inf)  # usually the slowest line is the client's own
        return client_link(server, self._bytes_per_s.get(server.peer_id, slowest))

    # ------------------------------------------------------------ measuring

    async def _measure_rate(self, server: ServerRecord) -> None:
        self._due_s[server.peer_id] = now_s() + _RETRY_AFTER_S
        try:
            async with asyncio.timeout(_MEASURE_TIMEOUT_S):
                connection = await self._connection(server)
            # The lock first: the wait for other measurements does not use up the time of this one.
            async with self._rating, asyncio.timeout(_MEASURE_TIMEOUT_S):
                self._bytes_per_s[server.peer_id] = await connection.bytes_per_s()
        except (SwarmError, TimeoutError) as error:
            _logger.info("the link to server %s could not be measured: %s", server.short_id, error)
            return
        self._due_s[server.peer_id] = now_s() + _AGAIN_AFTER_S

    async def _measure_errors_if_needed(self, route: Route) -> None:
        if not self._lacks_errors_for(route) or now_s() < self._errors_due_s:
            return
        async with self._measuring:
            if now_s() < self._errors_due_s:  # another caller's measurement failed during the wait
                return
            known = known_to(*(hop.server for hop in route))
            names = [name for name in to_measure(self.errors) if name in known]
            if not names:
                return
            await self._measure_errors(route, names)
            self._chosen.clear()
            _logger.info("relative error of the last hidden state: %s", self.errors)

    def _lacks_errors_for(self, route: Route) -> bool:
        """Return whether a link of this whole chain is so slow that a codec is of use whose error is not measured."""
        if self._compression != "auto" or self._sample is None:
            return False
        if Span(route[0].span.start, route[-1].span.end) != self._all_blocks:
            return False
        links = [self._link(*pair) for pair in _ways(route)]
        useful = {codec_for(link, self._width, self._item_bytes, LADDER) for link in links}
        return not useful.isdisjoint(to_measure(self.errors))

    async def _measure_errors(self, route: Route, names: Sequence[str]) -> None:
        """Measure the errors of the codecs whose outputs arrive in time."""
        position_s = self._through_s(route, ["raw", *names])
        assert self._sample is not None
        num_positions = self._sample.shape[1]
        if num_positions * position_s > _ERRORS_S:
            num_positions = min(num_positions, max(_LEAST_POSITIONS, int(_ERRORS_S / position_s)))
        sample = self._sample[:, :num_positions]
        tasks = {name: asyncio.ensure_future(self._through(route, name, sample)) for name in ("raw", *names)}
        try:
            await asyncio.wait(tasks.values(), timeout=_MEASURE_TIMEOUT_S + 2 * num_positions * position_s)
        finally:
            for task in tasks.values():
                task.cancel()
        outputs: dict[str, torch.Tensor] = {}
        for name, task in tasks.items():
            try:
                outputs[name] = task.result()
            except (SwarmError, asyncio.InvalidStateError) as error:  # the pass failed, or is late
                _logger.info("the error of codecs could not be measured with %s: %s", name, error)
                self._errors_due_s = now_s() + (_RETRY_AFTER_S if task.done() else _AGAIN_AFTER_S)
        exact = outputs.pop("raw", None)
        if exact is not None:
            for name, other in outputs.items():
                self.errors[name] = float((other - exact).norm() / exact.norm().clamp(min=1e-30))

    def _through_s(self, route: Route, names: Sequence[str]) -> float:
        """Return the seconds that one position takes through the chain, and back from each server, in all codecs."""
        size_bytes = sum(encoded_bytes(name, 1, self._width, self._item_bytes) for name in names)
        rates = [self.bytes_per_s(None, hop.server) or SLOW_BYTES_PER_S for hop in route]
        return sum(2 * size_bytes / rate for rate in rates)

    async def _through(self, route: Route, name: str, sample: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [1, positions, width] of the sample, with this codec on every link."""
        codec = CODECS[name]
        context = Context.of(BlockInput(sample))
        hidden = WireTensor.of(sample, codec)
        for hop in route:
            server = await self._connection(hop.server)
            output, _ = await server.forward(hop.span, hidden, context, unwatched, codec=codec)
            hidden = output.recoded(codec)
        return self.finish(hidden.decode(sample.shape, sample.dtype).float())


def _ways(hops: Sequence[Hop]) -> Iterable[tuple[ServerRecord | None, ServerRecord | None]]:
    """Return the two ends of each link of a chain: client to first server, between servers, and back."""
    return pairwise([None, *(hop.server for hop in hops), None])


def _sample_of(inputs: BlockInput) -> torch.Tensor:
    """Return the first unpadded positions of the row that has most of them, [1, positions, width]."""
    hidden, mask, row = inputs.hidden.detach(), inputs.attention_mask, 0
    attended = torch.ones(hidden.shape[1], dtype=torch.bool)
    if mask is not None:
        rows = mask[:, -hidden.shape[1] :].cpu() != 0
        row = int(rows.sum(1).argmax())
        attended = rows[row]
    return hidden[row : row + 1, attended.nonzero()[:_SAMPLE_POSITIONS, 0].to(hidden.device)].cpu().clone()
