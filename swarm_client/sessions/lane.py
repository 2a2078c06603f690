"""A lane: rows of a session on a chain of their own, with what the servers know of these rows."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_client.adapters.snapshots import AdapterSnapshot
from swarm_client.core import background
from swarm_client.core.events import PartReporter
from swarm_client.failover.journal import Journal
from swarm_client.sessions.call import SessionCall
from swarm_client.sessions.chain import Chain
from swarm_client.sessions.opening import LaneSettings
from swarm_client.transport.changes import merged
from swarm_client.verification.session_checks import SessionChecks
from swarm_protocol.failures import call_after
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput


class Lane:
    """A group of a session's rows on one chain of servers. Losing the last reference frees the KV room on the servers.

    ``step`` runs on the background loop; no other method may be called during it.
    """

    def __init__(
        self, setting: LaneSettings, journal: Journal | None = None, changes: Sequence[pb.Change] = ()
    ) -> None:
        """Create the lane without servers. Its rows are those of ``journal`` after ``changes``."""
        self._setting = setting
        self._reporter = PartReporter(setting.reporter)
        self.chain = Chain(setting, self._reporter)
        self._checks = SessionChecks(setting.swarm, self._reporter)
        self._journal = journal  # the positions that the servers know
        self._changes = list(changes)  # the changes since then
        call_after(
            self, lambda chain: background.submit(chain.close()), self.chain
        )  # servers notice the end of the process themselves

    @property
    def is_empty(self) -> bool:
        return self._journal is None

    @property
    def rows(self) -> Journal:
        """Return the journal of all positions, with the changes that the servers do not know yet."""
        assert self._journal is not None
        return _changed(self._journal, self._changes)

    async def step(
        self, inputs: BlockInput, num_wanted: int, watched: range, may_wait: bool, is_optional: bool = False
    ) -> SessionCall:
        """Return the call with its outputs. The positions count only after ``commit``.

        Rows that begin alike, such as several completions of one prompt, are computed once; see ``SessionCall``.

        ``may_wait``: wait for KV room; otherwise PeerBusy comes at once where there is none. ``is_optional``: see
        ``SessionCall``. The other arguments and the errors are those of ``RemoteSession.step``.
        """
        inputs, repeats = inputs.without_repeats() if self.is_empty and not watched else (inputs, [])
        batch_size, num_tokens, _ = inputs.hidden.shape
        before = self._journal or Journal.empty(batch_size)
        changes, after = tuple(self._changes), _changed(before, self._changes).appended(inputs)
        # Servers that were chosen before the session had pictures may be unable to compute them.
        lacks = inputs.joined is not None and not all(hop.server.joins for hop in self.chain.route)
        if lacks or self._checks.distrusts(self.chain.route):
            await self._leave_servers()
        num_asked = self._checks.num_asked(num_wanted, num_tokens)
        while True:
            call = SessionCall(
                inputs, num_asked, before, after, changes, watched=watched, is_optional=is_optional, repeats=repeats
            )
            await self.chain.step(call, may_wait)
            if not self._checks.are_made or await self._checks.accept(
                self.chain.route,
                self.chain.codecs,
                lambda row: after.reordered([row]).read(0, after.length),
                call.output(),
                num_tokens,
                after.length,
                self.chain.opener.adapter,
                next((change.reorder.indices for change in changes if change.HasField("reorder")), None),
            ):
                return call
            await self._leave_servers()

    async def _leave_servers(self) -> None:
        """Release all servers, because one of them is not trusted any more."""
        await self.chain.let_go()
        self._checks.begin_again()

    def commit(self, call: SessionCall) -> None:
        """Accept the call's positions as part of the lane."""
        self._journal = call.after
        self._changes.clear()
        if call.repeats:
            self.change(pb.Change(reorder=pb.Reorder(indices=call.repeats)))

    def change(self, change: pb.Change) -> None:
        """Record a change that travels with the next step. An empty lane has nothing to change.

        Raises:
            RequestRejected: see ``Journal.cropped``.
        """
        if self._journal is not None:
            changes = merged(self._changes, change)
            if change.HasField("crop"):
                _changed(self._journal, changes)  # only for the error that a crop may raise
            self._changes = changes

    def begin_with(self, inputs: BlockInput, adapter: AdapterSnapshot) -> None:
        """Give these positions to the empty lane; servers receive them with the next step."""
        self.chain.begin_with(adapter)
        self._journal = Journal.empty(len(inputs.hidden)).appended(inputs)

    def copy(self, setting: LaneSettings, rows: Sequence[int] | None = None) -> Lane:
        """Return an independent lane with some or all rows; its servers receive all positions by replay."""
        if self._journal is None:
            other = Lane(setting)
        elif rows is None:
            other = Lane(setting, self._journal.copy(), self._changes)
        else:
            other = Lane(setting, self.rows.reordered(rows).compacted())
        other.chain.continues(self.chain)
        return other

    def reset(self) -> None:
        """Make the lane empty again. The caller must have released its servers."""
        self.chain.reset()
        self._checks = SessionChecks(self._setting.swarm, self._reporter)
        self._journal = None
        self._changes.clear()


def joined(lanes: Sequence[Lane], setting: LaneSettings) -> Lane:
    """Return one lane with the rows of all lanes, which have equal lengths. It keeps the first lane's age in queues."""
    lane = Lane(setting)
    lane.chain.continues(lanes[0].chain)
    lane.chain.terms.ages_with(lanes[0].chain.terms)
    if not lanes[0].is_empty:
        journals = [each.rows for each in lanes]
        inputs = BlockInput.of_rows([rows.read(0, rows.length) for rows in journals])
        lane.begin_with(inputs, lanes[0].chain.opener.adapter)
    return lane


def _changed(journal: Journal, changes: Sequence[pb.Change]) -> Journal:
    for change in changes:
        kind = change.WhichOneof("kind")
        if kind == "reorder":
            journal = journal.reordered(change.reorder.indices)
        elif kind == "crop":
            journal = journal.cropped(change.crop.length)
    return journal
