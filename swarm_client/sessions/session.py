"""One generation through chains of servers, which hold its KV cache."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any, SupportsIndex

import torch

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.core import background
from swarm_client.core.events import Reporter, SessionStats
from swarm_client.routing.pipelining import divided, most_lanes
from swarm_client.routing.routing import Hop, Route
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.lane import Lane, joined
from swarm_client.sessions.opening import LaneSettings, SessionOptions
from swarm_client.swarm.swarm import Swarm
from swarm_protocol.errors import PeerBusy, RequestRejected, SwarmError
from swarm_protocol.failures import awaited_on_error
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.process.routine import end_tasks
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import MAX_BATCH_SIZE

_PLAIN = SessionOptions()


class RemoteSession:
    """The KV cache of one batch in a span of remote blocks.

    The session asks servers for KV room at the first step. When servers fail, other servers take their place and the
    session is replayed to them; the outputs stay the same. Closing, or losing the last reference, frees the room.

    The rows of a large batch are divided among several lanes if that is faster: see ``routing.pipelining``.

    ``options.on_event`` is called with what happens to the session (see ``swarm_client.core.events``). The call runs on
    the network thread and must not block it.

    Attributes:
        length: the number of positions in the cache, for every row.
        batch_size: the number of rows; None before the first step.
    """

    def __init__(
        self,
        swarm: Swarm,
        blocks: Span,
        max_positions: int | None,
        options: SessionOptions = _PLAIN,
        adapter: Callable[[], AdapterSnapshot] = AdapterSnapshot,
    ) -> None:
        """Create the session without servers. ``adapter`` is called at the first step, for the blocks' adapter."""
        reporter = Reporter(options.on_event or swarm.config.on_event)
        self._setting = LaneSettings(swarm, blocks, max_positions, options, reporter)
        self._adapter = adapter
        self._row_unit = options.row_unit
        self._lanes = [Lane(self._setting)]
        self._sizes: list[int] = []  # rows of each lane, from the first step on
        self._stays_whole = False  # the rows are not divided into lanes
        self._is_optional = False
        self._left: list[Lane] = []  # lanes without rows, whose servers are released at the next step
        self._lock = threading.Lock()  # for callers on other threads than the loop's
        self._turn = asyncio.Lock()  # held during a step, including the cleanup after an interruption
        self.length = 0
        self.batch_size: int | None = None

    @property
    def stats(self) -> SessionStats:
        """Return the counters of the session's work and of the events that it has met."""
        return self._setting.reporter.stats

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Return the servers that hold the KV cache now, first blocks first; empty before the first step.

        If the lanes use different chains, the servers of the first lane come first.
        """
        if len(self._lanes) == 1:
            return self._lanes[0].chain.route
        every = [hop for lane in self._lanes for hop in lane.chain.route]
        return tuple({(hop.server.peer_id, hop.span): hop for hop in every}.values())

    @property
    def num_sharing(self) -> int:
        """Return the number of sessions that the last server has computed for recently, this one included.

        Each lane counts as one session. 0: the server has not said.
        """
        hops = self._lanes[0].chain.hops
        return hops[-1].num_active if hops else 0

    def runs_on(self, swarm: Swarm) -> bool:
        """Return whether the session belongs to this connection."""
        return self._setting.swarm is swarm

    def fork(self) -> RemoteSession:
        """Return a new session that continues from here with the same adapter; this session stays as it is.

        The new session chooses its servers at its first step, and replays all positions to them. Servers that have the
        positions in their prefix cache do not compute them again.
        """
        setting = self._setting
        with self._lock:
            other = RemoteSession(setting.swarm, setting.blocks, setting.max_positions, setting.options, self._adapter)
            other._continue(self)
        return other

    def _continue(self, other: RemoteSession) -> None:
        """Take over the positions of ``other`` in lanes of this session's own."""
        if other.batch_size is not None:
            self._lanes = [lane.copy(self._setting) for lane in other._lanes]
            self._sizes, self._stays_whole = list(other._sizes), other._stays_whole
        self.length, self.batch_size = other.length, other.batch_size

    def __deepcopy__(self, _memo: dict[int, Any]) -> RemoteSession:
        return self.fork()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        raise TypeError(
            "keys and values on servers cannot be pickled: copy.deepcopy makes a session that continues from here"
        )

    def step(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """Return the hidden states after the last block, of the last ``num_wanted`` new positions or of all.

        inputs.hidden: [batch, new, hidden_size] -> [batch, num_wanted, hidden_size]. Long inputs go through the chain
        in chunks, as a pipeline. A step that fails leaves the session as it was before.

        Raises:
            RequestRejected: there are more positions than the model has, or the servers refuse the input.
            NoRoute, PeerBusy: no server holds some block, or none has had room for ``wait_timeout_s``.
            RecoveryFailed: servers failed, and no server could replace them within ``recovery_timeout_s``.
        """
        with self._lock:
            return background.run(self.step_on_loop(inputs, num_wanted))

    def step_through(self, inputs: BlockInput) -> tuple[torch.Tensor, ...]:
        """Run ``step``, and return the hidden states after every block, each [batch, new, hidden_size].

        If a server fails, the session starts over on other servers, so recovery takes longer than in ``step``.
        """
        blocks = self._setting.blocks
        watched = range(blocks.start, blocks.end - 1)
        with self._lock:
            calls = background.run(self._advance(inputs, None, watched))
        of_blocks = (torch.cat([call.output_of(block) for call in calls]) for block in watched)
        return (*of_blocks, torch.cat([call.output() for call in calls]))

    async def step_on_loop(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """Run ``step`` for code on the background loop; one call at a time."""
        outputs = [call.output_of_batch() for call in await self._advance(inputs, num_wanted)]
        if num_wanted is not None:  # a lane may have been asked for more outputs, to check them
            outputs = [output[:, -num_wanted:] for output in outputs]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    async def _advance(
        self, inputs: BlockInput, num_wanted: int | None, watched: range = range(0)
    ) -> list[SessionCall]:
        """Run one step of all lanes, and return each lane's call."""
        async with self._turn:
            if self._left:
                left, self._left = self._left, []
                await _close(left)
            return await self._advance_in_turn(inputs, num_wanted, watched)

    async def _advance_in_turn(self, inputs: BlockInput, num_wanted: int | None, watched: range) -> list[SessionCall]:
        batch_size, num_tokens, _ = inputs.hidden.shape
        check_length(self.length + num_tokens, self._setting.max_positions)
        if batch_size > MAX_BATCH_SIZE:
            raise RequestRejected(
                f"{batch_size} rows are more than a session may have: expected at most {MAX_BATCH_SIZE}"
            )
        if self.batch_size not in (None, batch_size):
            raise RequestRejected(f"hidden states of {batch_size} rows came for a session of {self.batch_size} rows")
        num_wanted = num_tokens if num_wanted is None else min(num_wanted, num_tokens)
        self._setting.swarm.links.see(inputs, self._setting.blocks)
        if inputs.joined is not None:
            self._setting.swarm.need_joins()
        await self._divide(batch_size)
        calls = await self._computed(inputs, num_wanted, watched)
        for lane, call in zip(self._lanes, calls, strict=True):
            lane.commit(call)
        self.length, self.batch_size = self.length + num_tokens, batch_size
        self.stats.count_step(batch_size * num_tokens)
        return calls

    async def _divide(self, batch_size: int) -> None:
        """Divide the rows among lanes, unless the session's servers have been asked already."""
        lane = self._lanes[0]
        if self.batch_size is None:
            del self._lanes[1:]  # lanes of a first step that failed
            if not lane.chain.hops:
                lane.chain.opener.use_adapter(self._adapter())
        if len(self._lanes) > 1 or not (lane.is_empty or lane.chain.is_new):
            return
        chains = await self._chains_of_lanes(batch_size)
        rows = divided(batch_size, len(chains), self._row_unit)
        if len(chains) > 1:
            self._lanes = [lane.copy(self._setting, range(part.start, part.stop)) for part in rows]
            for each, chain in zip(self._lanes, chains, strict=True):
                each.chain.opener.plan(chain)
        self._sizes = [part.stop - part.start for part in rows]

    async def _chains_of_lanes(self, batch_size: int) -> list[Route]:
        if self._stays_whole or most_lanes(batch_size, self._row_unit) == 1:
            return [()]
        setting = self._setting
        need_tokens = batch_size * max(1, setting.options.reserve_tokens, self.length)
        try:
            return await setting.swarm.chains_of_lanes(setting.blocks, batch_size, self._row_unit, need_tokens)
        except SwarmError:
            return [()]  # the lane then finds servers itself: it waits for them, or raises the reason

    async def _computed(self, inputs: BlockInput, num_wanted: int, watched: range) -> list[SessionCall]:
        """Compute the step on all lanes; if one lane finds no room, join them into one lane and compute there."""
        if len(self._lanes) > 1:
            try:
                return await self._by_lanes(inputs, num_wanted, watched)
            except PeerBusy:
                # If some lanes held room while others waited for it, sessions could block each other for good.
                self._become_one()
        return [await self._lanes[0].step(inputs, num_wanted, watched, True, self._is_optional)]

    async def _by_lanes(self, inputs: BlockInput, num_wanted: int, watched: range) -> list[SessionCall]:
        lanes, jobs = list(self._lanes), []
        for lane, size, end in zip(lanes, self._sizes, accumulate(self._sizes), strict=True):
            part = inputs.rows(slice(end - size, end))
            jobs.append(asyncio.ensure_future(lane.step(part, num_wanted, watched, False)))

        async def go_back() -> None:  # some lanes may have done the step
            going_back = asyncio.ensure_future(_go_back(jobs, lanes))
            while not going_back.done():  # a further interruption must not skip the cleanup
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(going_back)

        async with awaited_on_error(go_back):
            return await asyncio.gather(*jobs)

    def _become_one(self) -> None:
        """Join all rows into one lane; they are not divided again until ``reset``."""
        lanes, self._stays_whole = self._lanes, True
        self._lanes, self._sizes = [joined(lanes, self._setting)], [sum(self._sizes)]
        self._left += lanes

    def begin_with(self, inputs: BlockInput, adapter: AdapterSnapshot) -> None:
        """Replace all of the session's positions by these; servers receive them with the next step.

        ``adapter`` is the adapter that was added to the blocks when these inputs were computed.
        """
        self.reset()
        self._lanes[0].begin_with(inputs, adapter)
        self.batch_size, self.length, _ = inputs.hidden.shape
        self._sizes = [self.batch_size]

    def reorder(self, indices: torch.Tensor) -> None:
        """Reorder the rows: new row i is old row ``indices[i]``. The batch may grow or shrink.

        If rows would move between lanes, all lanes become one, which is replayed to servers and not divided again.
        """
        if self.batch_size is None:
            return
        wanted: list[int] = indices.tolist()
        parts = _by_lane(wanted, self._sizes)
        if parts is None:
            self._become_one()
            parts = [wanted]
        kept = [(lane, part) for lane, part in zip(self._lanes, parts, strict=True) if part or not wanted]
        for lane, part in kept:
            lane.change(pb.Change(reorder=pb.Reorder(indices=part)))
        self._left += [lane for lane, part in zip(self._lanes, parts, strict=True) if wanted and not part]
        self._lanes, self._sizes = [lane for lane, _ in kept], [len(part) for _, part in kept]
        self.batch_size = len(wanted)

    def crop(self, num_removed: int) -> None:
        """Forget the last ``num_removed`` positions. With 0, sliding windows drop what ``record_past`` kept."""
        length = max(0, self.length - num_removed)
        self._change(pb.Change(crop=pb.Crop(length=length)))
        self.length = length

    @contextmanager
    def with_optional_rows(self) -> Iterator[None]:
        """Make steps optional inside the context.

        They raise SwarmError at once if a server has no room, or if all servers must be replaced.
        """
        self._is_optional = True
        try:
            yield
        finally:
            self._is_optional = False

    @property
    def records_past(self) -> bool:
        """Return whether sliding windows keep the positions since the last ``crop``."""
        return self._lanes[0].chain.terms.records_past

    def record_past(self) -> None:
        """Let sliding-window blocks keep what a later ``crop`` needs."""
        for lane in self._lanes:
            lane.chain.terms.record_past()
        self._change(pb.Change(record_past=pb.RecordPast()))

    def reset(self) -> None:
        """Forget everything; the session can be used again."""
        self.close()
        del self._lanes[1:]
        self._lanes[0].reset()
        self._stays_whole = False
        self.length, self.batch_size = 0, None

    def close(self) -> None:
        """Free the KV room on the servers. The session stays usable: its next step replays it to servers."""
        with self._lock:
            background.run(self.close_on_loop())

    async def close_on_loop(self) -> None:
        """Run ``close`` for code on the background loop."""
        async with self._turn:
            left, self._left = self._left, []
            await _close([*self._lanes, *left])

    def _change(self, change: pb.Change) -> None:
        for lane in self._lanes:
            lane.change(change)


async def _close(lanes: Sequence[Lane]) -> None:
    await asyncio.gather(*(lane.chain.close() for lane in lanes))


async def _go_back(jobs: Sequence[asyncio.Future[SessionCall]], lanes: Sequence[Lane]) -> None:
    """Release the servers of all lanes: some may have done the step, so all go back to before it."""
    await end_tasks(jobs)
    await asyncio.gather(*(lane.chain.let_go() for lane in lanes))


def _by_lane(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]] | None:
    """Return the wanted rows of each lane, as row numbers within the lane; None if they are not in lane order."""
    starts = [0, *accumulate(sizes)]
    lanes = [bisect_right(starts, index) - 1 for index in indices]
    if lanes != sorted(lanes):
        return None
    found: list[list[int]] = [[] for _ in sizes]
    for index, lane in zip(indices, lanes, strict=True):
        found[lane].append(index - starts[lane])
    return found


def check_length(num_positions: int, max_positions: int | None) -> None:
    """Raise RequestRejected if the model has fewer positions; ``None`` stands for a model without limit."""
    if max_positions is not None and num_positions > max_positions:
        raise RequestRejected(
            f"{num_positions} positions are more than the model's {max_positions}: "
            "shorten the prompt or generate fewer tokens"
        )
