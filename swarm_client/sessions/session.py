"""One generation through a chain of servers, which hold its keys and values."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch

from swarm_client.adapters.snapshots import Snapshot
from swarm_client.core import background
from swarm_client.core.events import OnEvent, Reporter, SessionStats
from swarm_client.routing.routing import Hop
from swarm_client.sessions.call import Call
from swarm_client.sessions.chain import Chain
from swarm_client.sessions.journal import Journal
from swarm_client.swarm.swarm import Swarm
from swarm_client.transport.changes import merged
from swarm_client.verification.session_checks import SessionChecks
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import MAX_BATCH_SIZE


class RemoteSession:
    """Keys and values of one batch in a span of remote blocks.

    Servers are asked for room at the first step. When some fail, others take their place and the session is
    replayed to them; the outputs are the same. Closing, or losing the last reference, frees the room.

    ``on_event`` is called with what happens to the session (see ``swarm_client.core.events``), on the thread of the
    network, which it must not hold up.

    Attributes:
        length: positions in the cache, for every row.
        batch_size: rows; None before the first step.
    """

    def __init__(
        self,
        swarm: Swarm,
        blocks: Span,
        max_positions: int | None,
        reserve_tokens: int = 0,
        *,
        standby: bool | None = None,
        on_event: OnEvent | None = None,
        adapter: Callable[[], Snapshot] = Snapshot,
        is_bundled: bool = False,
    ) -> None:
        """``adapter`` is asked once, when the session begins, what is added to the blocks.

        ``is_bundled``: its steps travel in one message with those of other sessions that are ready at the same time.
        """
        self._swarm = swarm
        self._blocks = blocks
        self._max_positions = max_positions
        self._reserve_tokens = reserve_tokens
        self._standby = swarm.config.standby if standby is None else standby
        self._on_event = on_event
        self._adapter = adapter
        self._is_bundled = is_bundled
        self._reporter = Reporter(on_event or swarm.config.on_event)
        self._chain = Chain(swarm, blocks, max_positions, reserve_tokens, self._standby, self._reporter, is_bundled)
        self._checks = SessionChecks(swarm, self._reporter)
        self._journal: Journal | None = None  # what the servers know
        self._changes: list[pb.Change] = []  # since then
        self._lock = threading.Lock()
        weakref.finalize(self, _close_soon, self._chain).atexit = False  # servers notice the end of the process
        self.length = 0
        self.batch_size: int | None = None

    @property
    def stats(self) -> SessionStats:
        """Counters: what the session has done, and what has happened to it."""
        return self._reporter.stats

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The servers that hold its keys and values now, first blocks first; none before the first step."""
        return tuple(session.hop for session in self._chain.hops)

    @property
    def num_sharing(self) -> int:
        """Sessions that its last server has computed for lately, this one among them; 0: it has not said."""
        hops = self._chain.hops
        return hops[-1].num_active if hops else 0

    def runs_on(self, swarm: Swarm) -> bool:
        """Whether the session belongs to this connection."""
        return self._swarm is swarm

    def fork(self) -> RemoteSession:
        """A session of its own that goes on from here, with the same adapter; this one is as it was.

        Its servers are chosen at its first step, and what came before is replayed to them; those that have it in
        their prefix cache compute nothing again.
        """
        with self._lock:
            other = RemoteSession(
                self._swarm,
                self._blocks,
                self._max_positions,
                self._reserve_tokens,
                standby=self._standby,
                on_event=self._on_event,
                adapter=self._adapter,
                is_bundled=self._is_bundled,
            )
            if self._journal is not None:
                other._journal = self._journal.copy()
                other._changes = list(self._changes)
                other._chain.continues(self._chain)
            other.length, other.batch_size = self.length, self.batch_size
        return other

    def __deepcopy__(self, _memo: dict[int, Any]) -> RemoteSession:
        return self.fork()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        raise TypeError(
            "keys and values on servers cannot be pickled: copy.deepcopy makes a session that goes on alike"
        )

    def step(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """Hidden states after the last block, of the last ``num_wanted`` new positions or of all.

        inputs.hidden: [batch, new, hidden_size] -> [batch, num_wanted, hidden_size]. Long inputs go through the chain
        in chunks, one behind the other. A step that fails leaves the session where it stood before.

        Raises:
            RequestRejected: more positions than the model has, or the servers refuse the input.
            NoRoute, PeerBusy: no server holds some block, or none has had room for ``wait_timeout_s``.
            RecoveryFailed: servers failed, and nobody could take their place within ``recovery_timeout_s``.
        """
        with self._lock:
            return background.run(self.step_on_loop(inputs, num_wanted))

    def step_through(self, inputs: BlockInput) -> tuple[torch.Tensor, ...]:
        """``step`` that returns the hidden states after every block, each [batch, new, hidden_size].

        If a server fails meanwhile, the session begins again on other servers: recovery takes longer than in ``step``.
        """
        blocks = self._blocks
        with self._lock:
            call = background.run(self._advance(inputs, None, range(blocks.start, blocks.end - 1)))
        return (*(call.output_of(block) for block in call.watched), call.output())

    async def step_on_loop(self, inputs: BlockInput, num_wanted: int | None = None) -> torch.Tensor:
        """``step`` for code that runs on the background loop; one at a time."""
        call = await self._advance(inputs, num_wanted)
        return call.output() if num_wanted is None else call.output()[:, -num_wanted:]

    async def _advance(self, inputs: BlockInput, num_wanted: int | None, watched: range = range(0)) -> Call:
        batch_size, num_tokens, _ = inputs.hidden.shape
        total = self.length + num_tokens
        check_length(total, self._max_positions)
        check_batch_size(batch_size)
        num_wanted = num_tokens if num_wanted is None else min(num_wanted, num_tokens)
        if self._journal is None and not self._chain.hops:
            self._chain.adapter = self._adapter()
        before = self._journal or Journal.empty(batch_size)
        rows = _changed(before, self._changes)
        if rows.batch_size != batch_size:
            raise RequestRejected(f"hidden states of {batch_size} rows came for a session of {rows.batch_size} rows")
        changes, after = tuple(self._changes), rows.appended(inputs)
        self._swarm.links.see(inputs.hidden)
        if self._checks.distrusts(self.hops):
            await self._leave_servers()
        num_asked = self._checks.num_asked(num_wanted, num_tokens)
        while True:
            call = Call(inputs, num_asked, before, after, changes, watched=watched)
            await self._chain.step(call)
            if not self._checks.are_made or await self._checks.accept(
                self.hops,
                lambda row: after.reordered([row]).read(0, total),
                call.output(),
                num_tokens,
                total,
                self._chain.adapter,
                next((change.reorder.indices for change in changes if change.HasField("reorder")), None),
            ):
                break
            await self._leave_servers()
        self._journal = call.after
        self._changes.clear()
        self.length, self.batch_size = total, batch_size
        self.stats.steps += 1
        self.stats.tokens += batch_size * num_tokens
        return call

    async def _leave_servers(self) -> None:
        """One of them is not believed any more."""
        await self._chain.let_go()
        self._checks.begin_again()

    def begin_with(self, inputs: BlockInput, adapter: Snapshot) -> None:
        """The session has these positions from now on and no others; servers learn of them with the next step.

        ``adapter`` is what was added to the blocks when their outputs were computed.
        """
        self.reset()
        self._chain.adapter, self._chain.is_new = adapter, True
        batch_size, self.length, _ = inputs.hidden.shape
        self._journal, self.batch_size = Journal.empty(batch_size).appended(inputs), batch_size

    def reorder(self, indices: torch.Tensor) -> None:
        """New row i is old row ``indices[i]``; the batch may grow or shrink."""
        self._change(pb.Change(reorder=pb.Reorder(indices=indices.tolist())))
        self.batch_size = len(indices)

    def crop(self, num_removed: int) -> None:
        """Forgets the last ``num_removed`` positions (0 lets sliding windows drop what recording kept)."""
        length = max(0, self.length - num_removed)
        self._change(pb.Change(crop=pb.Crop(length=length)))
        self.length = length

    def record_past(self) -> None:
        """Lets sliding-window blocks keep what a later ``crop`` needs."""
        self._chain.record_past()
        self._change(pb.Change(record_past=pb.RecordPast()))

    def reset(self) -> None:
        """Forgets everything; the session can be used again."""
        self.close()
        self._chain.is_new = False
        self._checks = SessionChecks(self._swarm, self._reporter)
        self._journal = None
        self._changes.clear()
        self.length, self.batch_size = 0, None

    def close(self) -> None:
        """Frees the room on the servers. The session goes on if it is used again: it is replayed."""
        with self._lock:
            background.run(self.close_on_loop())

    async def close_on_loop(self) -> None:
        """``close`` for code that runs on the background loop."""
        await self._chain.close()

    def _change(self, change: pb.Change) -> None:
        """Travels with the next step; there is nothing to change before the first."""
        if self._journal is not None:
            self._changes = merged(self._changes, change)


def check_length(num_positions: int, max_positions: int | None) -> None:
    """Raises RequestRejected if the model has fewer positions; ``None`` stands for a model without limit."""
    if max_positions is not None and num_positions > max_positions:
        raise RequestRejected(
            f"{num_positions} positions are more than the model's {max_positions}: "
            "shorten the prompt or generate fewer tokens"
        )


def check_batch_size(batch_size: int) -> None:
    """Raises RequestRejected if servers do not take so many rows."""
    if batch_size > MAX_BATCH_SIZE:
        raise RequestRejected(f"{batch_size} rows are more than a session may have: expected at most {MAX_BATCH_SIZE}")


def _changed(journal: Journal, changes: list[pb.Change]) -> Journal:
    for change in changes:
        kind = change.WhichOneof("kind")
        if kind == "reorder":
            journal = journal.reordered(change.reorder.indices)
        elif kind == "crop":
            journal = journal.cropped(change.crop.length)
    return journal


def _close_soon(chain: Chain) -> None:
    background.submit(chain.close())
