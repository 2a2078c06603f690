"""The events of a running session, which are reported to the user by log lines, counters, and a callback."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from swarm_client.core.background import now_s
from swarm_protocol.dht.records import short_id
from swarm_protocol.failures import logged_errors
from swarm_protocol.span import Span
from swarm_protocol.telemetry.tracing import tracing

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """The event that blocks moved to other servers because a server failed.

    Attributes:
        failed: the ids of the servers that computed the blocks until now; ``reason``: why these servers were replaced.
        replayed_tokens: the number of positions that were computed again, in every row.
        from_copy: whether a standby replica took over, which had all or nearly all keys and values.
        stall_s: the time from the last progress, or from the call that found the failure, to the next answer.
    """

    span: Span
    failed: tuple[str, ...]
    reason: str
    replacements: tuple[str, ...]
    replayed_tokens: int
    from_copy: bool
    stall_s: float

    def __str__(self) -> str:
        what = "a standby replica took over" if self.from_copy else f"replayed {self.replayed_tokens} tokens"
        what += f" in {_seconds(self.stall_s)} s"
        return f"{self.reason}; blocks {self.span} move to {_names(self.replacements)}; {what}"


@dataclass(frozen=True)
class Move:
    """The event that blocks and their KV cache moved to another server, because a server wanted to leave."""

    span: Span
    server: str
    replacement: str
    copied_tokens: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"server {short_id(self.server)} leaves; blocks {self.span} move to {short_id(self.replacement)}; "
            f"copied {self.copied_tokens} tokens in {_seconds(self.seconds)} s"
        )


@dataclass(frozen=True)
class Waiting:
    """The event that no server holds some blocks, or has room for the session, so that the client waits."""

    reason: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.reason}; waiting for up to {_seconds(self.timeout_s)} s"


@dataclass(frozen=True)
class Retry:
    """The event that a pass is repeated because a server did not finish it, on another server if possible."""

    span: Span | None
    server: str
    reason: str

    def __str__(self) -> str:
        what = "the pass is" if self.span is None else f"blocks {self.span} are"
        return f"{self.reason}; {what} computed again"


@dataclass(frozen=True)
class WrongAnswers:
    """The event that a server has answered wrongly: other answers differ from its own. The client stops using it.

    Attributes:
        span: the blocks that ``server`` computed; both ``server`` and ``witnesses`` are peer ids.
        witnesses: the servers whose answers differ. The server itself is among them if it contradicted itself.
    """

    span: Span
    server: str
    witnesses: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"server {short_id(self.server)} answered wrongly over blocks {self.span}, as {_names(self.witnesses)} "
            "show; it is not used any more"
        )


@dataclass(frozen=True)
class DoubtfulTokens:
    """The event that positions already used have passed through servers that were found to answer wrongly.

    Attributes:
        first, end: the half-open range of these positions; earlier ones were checked, or precede a checked one.
    """

    servers: tuple[str, ...]
    first: int
    end: int

    def __str__(self) -> str:
        return f"positions {self.first} to {self.end - 1} are doubtful: they passed through {_names(self.servers)}"


Event = Recovery | Move | Waiting | Retry | WrongAnswers | DoubtfulTokens
OnEvent = Callable[[Event], None]


@dataclass
class SessionStats:
    """The counters of one session.

    Attributes:
        steps, tokens: the calls of ``step``, and the positions they added, over all rows.
        recoveries: how often blocks moved because a server failed; ``standbys_used``: how often to a standby replica.
        replayed_tokens: the number of positions that were computed again, in every row.
        stall_s: the seconds for which generation, or some rows of it, stood still.
        moves: how often blocks moved with their KV cache because a server left; ``copied_tokens``: the positions whose
            keys and values were copied for that, in every row.
        waits: how often the session had to wait for servers or for room.
        checks: how often other servers computed answers again to check them.
        doubtful_tokens: the positions, in every row, that went through servers later found to answer wrongly.
    """

    steps: int = 0
    tokens: int = 0
    recoveries: int = 0
    standbys_used: int = 0
    replayed_tokens: int = 0
    stall_s: float = 0.0
    moves: int = 0
    copied_tokens: int = 0
    waits: int = 0
    checks: int = 0
    doubtful_tokens: int = 0

    def count_step(self, num_tokens: int) -> None:
        self.steps += 1
        self.tokens += num_tokens

    def count_check(self) -> None:
        self.checks += 1

    def count_event(self, event: Event) -> None:
        """Count the event, without the time that it took."""
        if isinstance(event, Recovery):
            self.recoveries += 1
            self.standbys_used += event.from_copy
            self.replayed_tokens += event.replayed_tokens
        elif isinstance(event, Move):
            self.moves += 1
            self.copied_tokens += event.copied_tokens
        elif isinstance(event, Waiting):
            self.waits += 1
        elif isinstance(event, DoubtfulTokens):
            self.doubtful_tokens += event.end - event.first

    def count_stall(self, seconds: float) -> None:
        self.stall_s += seconds


class Reporter:
    """A session's reporter, which counts and logs events and calls the user's callback.

    Attributes:
        num_repairs: how often blocks have moved, for any reason.
    """

    def __init__(self, on_event: OnEvent | None = None, clock: Callable[[], float] = now_s) -> None:
        self.stats = SessionStats()
        self.num_repairs = 0
        self._on_event = on_event
        self._clock = clock
        self._stalls: list[tuple[float, float]] = []  # start and end of each; they do not overlap

    def report(self, event: Event) -> None:
        self.num_repairs += isinstance(event, Recovery | Move)
        self.stats.count_event(event)
        if isinstance(event, Recovery):
            self.stats.count_stall(self._newly_stalled_s(event.stall_s))
        _logger.warning("%s", event)
        tracing().event(type(event).__name__, _attributes(event))
        if self._on_event is not None:
            with logged_errors(_logger, "the callback for events failed"):  # user code: the session goes on
                self._on_event(event)

    def _newly_stalled_s(self, seconds: float) -> float:
        """Return the part of the ended stall that no earlier stall covers: lanes can stand still together."""
        now = self._clock()
        start, new_s = now - seconds, seconds
        while self._stalls and self._stalls[-1][1] > start:
            first, end = self._stalls.pop()
            new_s -= end - max(first, start)
            start = min(first, start)
        self._stalls.append((start, now))
        return max(0.0, new_s)


class PartReporter(Reporter):
    """A reporter of some rows that forwards to the session's reporter; ``num_repairs`` counts only these rows."""

    def __init__(self, whole: Reporter) -> None:
        super().__init__()
        self.stats, self._whole = whole.stats, whole

    def report(self, event: Event) -> None:
        self.num_repairs += isinstance(event, Recovery | Move)
        self._whole.report(event)


def _attributes(event: Event) -> dict[str, bool | int | float | str | tuple[str, ...]]:
    """Return the event's fields as attributes of an event of a trace."""
    return {
        f"swarm.{name}": value if isinstance(value, bool | int | float | str | tuple) else str(value)
        for name, value in vars(event).items()
    }


def _seconds(seconds: float) -> str:
    """Return two significant digits below 10 s, and whole seconds above; never an exponent."""
    return f"{seconds:.2g}" if 1e-3 < seconds < 10 else f"{seconds:.0f}"


def _names(peer_ids: tuple[str, ...]) -> str:
    return ", ".join(map(short_id, peer_ids))
