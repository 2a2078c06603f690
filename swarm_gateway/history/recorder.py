"""Observes a swarm repeatedly, informs listeners, and writes the history."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from swarm_client.core.background import now_s
from swarm_gateway.history.store import HistoryStore, StoredEvent, SwarmSample, is_busy
from swarm_gateway.history.work import Key, Rate, Tally, advance
from swarm_gateway.monitor.model_monitor import ModelStatus, ServerStatus
from swarm_gateway.monitor.monitor import Monitor, SwarmSnapshot
from swarm_gateway.monitor.server_events import SwarmEvent, events_between
from swarm_protocol.dht.records import ServerRecord, ServerState
from swarm_protocol.errors import NoSwarm, SwarmError
from swarm_protocol.failures import logged_errors

_logger = logging.getLogger(__name__)
SAMPLE_S = 10.0
_LOOK_S, _RARELY_S = 2.0, 10.0  # between two looks: while a caller is interested, and otherwise
_WANTED_S = 30.0  # how long a request keeps the interest alive
_PEERS_S = 30.0  # between two reads of the connected peers
_PRUNE_S = 3600.0
_MAX_UNWRITTEN = 1000  # events that are kept while the history is busy


@dataclass(frozen=True)
class Observation:
    """The result of the last look at the swarm.

    Attributes:
        time: the time of the look, in seconds since 1970; 0 before the first look.
        snapshot: the swarm; None if it has not been reached.
        trouble: why the last look failed; empty if it did not.
        tallies: the work of all known servers, including those that are gone.
        peers: multiaddrs of members.
    """

    time: float = 0.0
    snapshot: SwarmSnapshot | None = None
    trouble: str = ""
    tallies: Mapping[Key, Tally] = field(default_factory=dict)
    peers: Sequence[str] = ()
    last_event_id: int = 0

    @property
    def models(self) -> tuple[ModelStatus, ...]:
        """Return the models that have servers, as far as is known."""
        return self.snapshot.models if self.snapshot else ()

    def rate(self, model: str) -> Rate:
        """Return the rate of all servers of a model."""
        statuses = [status for status in self.models if status.model == model]
        return sum((self.rate_of(model, server) for status in statuses for server in status.servers), Rate())

    def rate_of(self, model: str, server: ServerStatus) -> Rate:
        """Return the server's rate; zero if it does not answer."""
        tally = self.tallies.get((model, server.record.peer_id))
        return tally.rate_at(self.time) if tally is not None and server.answers else Rate()


class HistoryRecorder:
    """A recorder that replaces a ``Monitor`` for its readers. All coroutines run on the background loop."""

    def __init__(self, monitor: Monitor, history: HistoryStore, clock: Callable[[], float] = time.time) -> None:
        """Take over ``history``, which ``close`` closes. ``clock`` returns Unix time in seconds."""
        self._monitor = monitor
        self._clock = clock
        self._observation = Observation(tallies=history.tallies(), last_event_id=history.last_event_id())
        self._history = history
        self._listeners: set[Callable[[], None]] = set()
        self._wanted_until = self._sampled_at = self._peers_at = self._pruned_at = -inf
        self._writes = False
        # Later events in the history may be the same as events that this process has not written yet.
        self._events_since = self._observation.last_event_id
        self._unwritten: Sequence[SwarmEvent] = ()  # events since the history became busy
        self._looking: asyncio.Task[None] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "history")  # writes must keep their order
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ for any thread

    @property
    def latest(self) -> Observation:
        self._wanted_until = self._clock() + _WANTED_S
        return self._observation

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` on the background loop at each new observation; return a function that stops this."""
        self._listeners = {*self._listeners, callback}  # a new set, because the loop may iterate over the old one

        def stop() -> None:
            self._listeners = self._listeners - {callback}

        return stop

    def events(self, after: int = 0, most: int = 1000) -> list[StoredEvent]:
        """Return stored events: see ``HistoryStore.events``. The call blocks."""
        return [] if after == self._observation.last_event_id else self._history.events(after, most)

    def samples(self, resolution: int, since: float) -> list[tuple[int, SwarmSample]]:
        """Return stored samples: see ``HistoryStore.samples``. The call blocks."""
        return self._history.samples(resolution, since)

    # ------------------------------------------------------------ for the background loop

    async def start(self) -> None:
        self._looking = asyncio.ensure_future(self._run())

    async def look(self) -> SwarmSnapshot:
        """Return the last snapshot; wait for the first one.

        Raises:
            NoSwarm: the swarm has not been reached so far.
        """
        while not self._observation.time:
            await self._changed.wait()
        observation = self.latest
        if observation.snapshot is None:
            raise NoSwarm(observation.trouble)
        return observation.snapshot

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        await self._monitor.close()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._finish)
        self._thread.shutdown()

    async def _run(self) -> None:
        while True:
            began_s = now_s()
            with logged_errors(_logger, "a look at the swarm failed; the next one may succeed"):
                try:
                    await self._look(self._pause_s())
                except (SwarmError, OSError, TimeoutError) as error:
                    _logger.info("the swarm cannot be looked at: %s", error)
                    self._notify(replace(self._observation, time=self._clock(), trouble=str(error) or repr(error)))
            while now_s() < began_s + self._pause_s():  # short sleeps, because a request may shorten the pause
                await asyncio.sleep(min(_LOOK_S, began_s + self._pause_s() - now_s()))

    def _pause_s(self) -> float:
        return _LOOK_S if self._listeners or self._clock() < self._wanted_until else _RARELY_S

    async def _look(self, wait_s: float) -> None:
        before = self._observation
        is_first = before.snapshot is None
        snapshot = await (self._monitor.look() if is_first else self._monitor.look_again(wait_s))
        now = self._clock()
        peers = before.peers
        if now - self._peers_at >= _PEERS_S or not peers:
            peers, self._peers_at = await self._monitor.peers() or peers, now
        events = [] if before.snapshot is None else events_between(before.snapshot, snapshot)
        seen = Observation(now, snapshot, "", before.tallies, peers, before.last_event_id)
        self._notify(await asyncio.get_running_loop().run_in_executor(self._thread, self._kept, seen, events))

    def _notify(self, observation: Observation) -> None:
        self._observation = observation
        self._changed.set()
        for callback in self._listeners:
            callback()

    # ------------------------------------------------------------ for the thread that writes

    def _kept(self, seen: Observation, events: Sequence[SwarmEvent]) -> Observation:
        """Write to the history. Return the observation with all that this and other processes have added to it."""
        events = [*self._unwritten, *events][-_MAX_UNWRITTEN:]
        try:
            kept = self._write(seen, events)
        except sqlite3.Error as error:
            if is_busy(error):
                _logger.info("the history is busy: %s", error)
                self._unwritten = events
                return seen
            _logger.warning(
                "the history %s cannot be written (%s): from now on it is kept in memory", self._history.path, error
            )
            with contextlib.suppress(sqlite3.Error):
                self._history.close()
            self._history, self._writes = HistoryStore(None, seen.last_event_id), False
            kept = self._write(seen, events)
        self._unwritten, self._events_since = (), seen.last_event_id
        return kept

    def _write(self, seen: Observation, events: Sequence[SwarmEvent]) -> Observation:
        history, now, wrote = self._history, seen.time, self._writes
        is_due = now - self._sampled_at >= SAMPLE_S or now < self._sampled_at  # the clock may have been set back
        if is_due or events:
            self._writes = history.may_write(now)
        seen = replace(seen, tallies=self._advanced_tallies(seen, wrote))
        if self._writes and events:
            if self._unwritten or not wrote:  # another process may have written some, or this one before it failed
                written = Counter(stored.event for stored in history.events(self._events_since))
                events = [event for event in events if not _taken(written, event)]
            history.add_events(events, now)
        if is_due:
            if self._writes:
                history.add_sample(sample_of(seen), now)
                self._save(seen.tallies)
            self._sampled_at = now
        return replace(self._pruned(seen), last_event_id=history.last_event_id())

    def _advanced_tallies(self, seen: Observation, wrote: bool) -> dict[Key, Tally]:
        """Return the tallies up to now. A process that has just become the writer continues those of the history."""
        tallies = dict(seen.tallies if wrote or not self._writes else self._history.tallies() or seen.tallies)
        advance(tallies, seen.models, seen.time)
        return tallies

    def _pruned(self, seen: Observation) -> Observation:
        """Prune the history if it is time. Return the observation with the tallies that are left."""
        if seen.time - self._pruned_at < _PRUNE_S:
            return seen
        self._pruned_at = seen.time
        if not self._writes:
            return seen
        self._history.prune(seen.time)
        return replace(seen, tallies=self._history.tallies())

    def _save(self, tallies: Mapping[Key, Tally]) -> None:
        """Save the tallies that have changed since the last sample."""
        self._history.save_tallies(tally for tally in tallies.values() if tally.last.time >= self._sampled_at)

    def _finish(self) -> None:
        try:
            if self._writes:
                self._save(self._observation.tallies)
                self._history.stop_writing()
        except sqlite3.Error as error:
            _logger.info("the history was not finished: %s", error)
        self._history.close()


def _taken(events: Counter[SwarmEvent], event: SwarmEvent) -> bool:
    """Return whether the event is among these, and remove one copy of it."""
    events[event] -= 1
    return events[event] >= 0


def sample_of(seen: Observation) -> SwarmSample:
    models = seen.models
    servers = [server for status in models for server in status.servers]
    online = [server.record for server in servers if server.answers and server.record.state is ServerState.ONLINE]
    rate = sum((seen.rate(status.model) for status in models), Rate())
    return SwarmSample(
        servers=len(servers),
        servers_online=len(online),
        tokens_per_s=rate.decoded,
        prompt_tokens_per_s=rate.prompts,
        queue_delay_s=sum(record.queue_delay_s for record in online) / max(len(online), 1),
        kv_used=_kv_used(online),
        blocks_missing=sum(len(span) for status in models for span in status.missing),
    )


def _kv_used(servers: Sequence[ServerRecord]) -> float:
    """Return the used share of the servers' KV room."""
    room = sum(record.cache_tokens * len(record.span) for record in servers)
    left = sum(min(record.cache_tokens_left, record.cache_tokens) * len(record.span) for record in servers)
    return 1 - left / room if room else 0.0
