"""The watch of all stages of a run: it finds their peers on the DHT, and asks them for news.

A watcher's exchange brings no record of its own. A peer answers it as any other, and waits until it has something to
say. Hence news of a stage arrives after one trip through the network, whether or not the watcher has a stage itself.

The watcher also relays records that a peer has not mentioned recently. Hence peers of a stage that cannot call each
other know of each other nevertheless.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from swarm_protocol.errors import PeerUnavailable, SwarmError
from swarm_training.core.network import Network
from swarm_training.core.record import JOINING, PRESENT, Progress
from swarm_training.pb import training_pb2 as pb
from swarm_training.progress.board import DhtPeerRegistry
from swarm_training.progress.table import ProgressTable
from swarm_training.stages.routing.run_stages import RunStages

_NUM_ASKED = 2  # peers of a stage at a time, since one of them may be silent
_WAIT_S = 1.0  # the time for which a peer without news may keep its answer
_TIMEOUT_S = 3.0  # the time limit beyond ``_WAIT_S``
_PAUSE_S = 0.01  # between two calls of one peer, so that it collects news that can wait
_RETRY_S = 0.25
_LOOK_S = 0.2
_READ_S, _READ_ALONE_S = 15.0, 1.0  # between two reads of the DHT, if peers of the stage are known, and if none is
_UNMENTIONED_S = 2.0  # two heartbeats: a peer that does not mention another one for so long may be cut off from it
_MAX_RELAYED = 64  # records in one call
_logger = logging.getLogger(__name__)


class RunWatch:
    """The watch of all stages of a run. All its methods are for one event loop."""

    def __init__(
        self,
        runs: Sequence[str],
        network: Network,
        boards: Mapping[int, DhtPeerRegistry],
        silence_s: float,
        rng: random.Random,
        own: Mapping[int, Callable[[], Iterable[Progress]]] | None = None,
        banned: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        """Set up the watch. ``runs``: the names of the stages' runs, from the first on. ``boards``: the boards of the
        watched stages. ``own``: stages with peers that this process knows anyway, joining peers included. ``banned``:
        returns the ids of peers that are left out."""
        self._watched = {
            number: StageWatch(runs[number], network, board, silence_s, rng) for number, board in boards.items()
        }
        self._own = dict(own or {})
        self._banned = banned
        self.num_stages = len(runs)
        assert set(range(len(runs))) == self._watched.keys() | self._own.keys()

    @property
    def tables(self) -> list[ProgressTable]:
        return [watched.table for watched in self._watched.values()]

    def records(self, stage: int) -> list[Progress]:
        """Return the records of a stage's peers that have been heard of lately."""
        return [record for record in self.placed(stage) if record.state in PRESENT]

    def placed(self, stage: int) -> list[Progress]:
        """Return these records, and those of peers that are on their way to the stage."""
        if stage in self._own:
            return list(self._own[stage]())
        banned = self._banned()
        heard = self._watched[stage].table.heard(asyncio.get_running_loop().time(), {*PRESENT, JOINING})
        return [record for record in heard if record.peer_id not in banned]

    async def look(self) -> None:
        """Read all boards now: they also have peers that cannot be asked yet."""
        await asyncio.gather(*(watched.look() for watched in self._watched.values()))

    def all_records(self) -> list[list[Progress]]:
        """Return the records of each stage's peers."""
        return [self.records(number) for number in range(self.num_stages)]

    def view(self) -> RunStages:
        return RunStages.of(self.all_records())

    async def until_complete(self, timeout_s: float) -> None:
        """Wait until every stage has a peer. Raises PeerUnavailable if one has none after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.view().moment is None:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            empty = ", ".join(str(number) for number, stage in enumerate(self.view().stages) if not stage)
            raise PeerUnavailable(f"nobody is at stage {empty}: expected a peer at each") from None

    async def run(self) -> None:
        """Watch until cancelled, also if there is no other stage to watch."""
        await asyncio.gather(*(watched.run() for watched in self._watched.values()), asyncio.Event().wait())

    async def relay(self, on_news: Callable[[], None]) -> None:
        """Call ``on_news`` whenever there is news for which a peer may wait, until cancelled."""
        await asyncio.gather(*(_relay(table, on_news) for table in self.tables))


class StageWatch:
    """The watch of one stage, through a few of its peers at a time."""

    def __init__(
        self, run: str, network: Network, board: DhtPeerRegistry, silence_s: float, rng: random.Random
    ) -> None:
        self.table = ProgressTable(run, None, "", silence_s)
        self._network = network
        self._board = board
        self._rng = rng
        self._since: dict[str, int] = {}  # by peer: the counter up to which it has answered
        self._asked: set[str] = set()

    async def run(self) -> None:
        await asyncio.gather(self._read(), *(self._ask() for _ in range(_NUM_ASKED)))

    async def look(self) -> None:
        self._note(await self._board.read())

    async def _read(self) -> None:
        while True:
            await self.look()
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(_READ_S if self.table.heard(now) else _READ_ALONE_S)

    async def _ask(self) -> None:
        """Ask one peer after another, and the same one as long as it answers."""
        while True:
            peers = [peer for peer in self.table.known() if peer.is_reachable and peer.peer_id not in self._asked]
            if not peers:
                await asyncio.sleep(_RETRY_S)
                continue
            peer = self._rng.choice(peers)
            self._asked.add(peer.peer_id)
            try:
                await self._follow(peer)
            finally:
                self._asked.discard(peer.peer_id)
            await asyncio.sleep(_RETRY_S)

    async def _follow(self, peer: Progress) -> None:
        mentions = _Mentions(asyncio.get_running_loop().time())
        while True:
            others = mentions.lacking(peer.peer_id, self.table, asyncio.get_running_loop().time())
            request = pb.ExchangeRequest(since=self._since.get(peer.peer_id, 0), wait_s=_WAIT_S, others=others)
            try:
                async with asyncio.timeout(_WAIT_S + _TIMEOUT_S):
                    reply = await self._network.exchange(peer, request)
            except (SwarmError, TimeoutError) as error:
                _logger.debug("%s does not report on its stage: %s", peer.peer_id, error)
                self._since.pop(peer.peer_id, None)
                if await self._network.is_gone(peer):
                    self.table.note_gone(peer.peer_id)
                return
            self._since[peer.peer_id] = reply.until
            self._note(reply.records)
            mentions.note(reply.records, asyncio.get_running_loop().time())
            await asyncio.sleep(_PAUSE_S)

    def _note(self, records: Iterable[pb.SignedProgress]) -> None:
        for record in records:
            with suppress(ValueError):  # a stranger's record may be anything
                self.table.add(record, asyncio.get_running_loop().time())


async def until_end(watch: RunWatch) -> int:
    """Wait until the run has ended, since the loss on held-out data falls no more, and all stages have taken its last
    step. Return the number of steps."""
    while True:
        view = watch.view()
        if view.has_ended and view.stages and all(view.stages):
            ended = {max(peer.moment for peer in stage) for stage in view.stages}
            if len(ended) == 1:
                return ended.pop().step
        await asyncio.sleep(_LOOK_S)


async def _relay(table: ProgressTable, on_news: Callable[[], None]) -> None:
    while True:
        await table.urgent_since(table.counter)
        on_news()


class _Mentions:
    """The record of which peers one peer has mentioned by itself, and when."""

    def __init__(self, now: float) -> None:
        self._began_s = now
        self._mentioned_s: dict[str, float] = {}
        self._relayed: dict[str, bytes] = {}  # by peer: the last record sent, which is no news when it comes back

    def note(self, records: Iterable[pb.SignedProgress], now: float) -> None:
        for record in records:
            with suppress(DecodeError):  # a stranger's record may be anything
                about = pb.Progress.FromString(record.progress).peer_id
                if self._relayed.get(about) != record.progress:
                    self._mentioned_s[about] = now

    def lacking(self, callee: str, table: ProgressTable, now: float) -> list[pb.SignedProgress]:
        """Return the records of peers that have been heard of, but that this peer has not mentioned lately."""
        found: list[pb.SignedProgress] = []
        for record in table.heard(now):
            if len(found) == _MAX_RELAYED:
                break
            signed = table.signed_of(record.peer_id)
            is_mentioned = now - self._mentioned_s.get(record.peer_id, self._began_s) <= _UNMENTIONED_S
            if record.peer_id != callee and signed is not None and not is_mentioned:
                self._relayed[record.peer_id] = signed.progress
                found.append(signed)
        return found
