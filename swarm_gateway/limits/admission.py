"""Admission of requests: API keys, rate limits, the fair queue of generations, and refusals."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

_RETRY_S = 5  # the wait after which a client that found the queue full may try again
_MINUTE_S = 60.0
QueueName = Literal["generations", "preparations"]  # the queues of an admission


class ApiError(Exception):
    """An error that is sent as the answer to a request. ``body`` has OpenAI's shape; see ``web.http.Dialect``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one in each line. Raise ValueError if there are none, or a line is no key."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"{path} has no keys: expected one in each line")
    for number, key in enumerate(lines, 1):
        if key in keys and (not key.isascii() or not key.isprintable() or " " in key):
            raise ValueError(f"line {number} of {path} is no key: expected ASCII without spaces")
    return keys


def check_key(keys: Sequence[str], header: str | None) -> str:
    """Return the key in an Authorization header. Raise ApiError if the key is not one of ``keys``."""
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise ApiError(401, "there is no API key: expected `Authorization: Bearer KEY`", code="invalid_api_key")
    # Compare with all keys, and all bytes of each: the time that this takes says nothing about the keys.
    found = [key for key in keys if hmac.compare_digest(key.encode(), given.strip().encode())]
    if not found:
        raise ApiError(401, "the API key is not known here", code="invalid_api_key")
    return found[0]


@dataclass(frozen=True)
class GatewayLimits:
    """The gateway's limits. Construction raises ValueError if a field is out of its range."""

    max_active: int = 64  # generations
    max_queued: int = 256  # generations that wait for others to end
    requests_per_minute: int | None = None  # of each key

    def __post_init__(self) -> None:
        if self.max_active < 1:
            raise ValueError(f"--max-active is {self.max_active}: expected at least 1")
        if self.max_queued < 0:
            raise ValueError(f"--max-queued is {self.max_queued}: expected 0 or more")
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise ValueError(f"--requests-per-minute is {self.requests_per_minute}: expected at least 1")

    def check_count(self, count: int, most_queued: int | None = None) -> None:
        """Raise ApiError if a request may never have ``count`` generations, of which ``most_queued`` may wait."""
        most = self.max_active + (self.max_queued if most_queued is None else most_queued)
        if count > most:
            message = f"the request asks for {count} generations: this server takes {most} at most"
            raise ApiError(400, message, param="n")


DEFAULT_LIMITS = GatewayLimits()


class RateLimit:
    """A limit on the requests of each key within any 60 s."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        """Set the limit; ``per_minute`` None is no limit, and ``clock`` returns seconds."""
        self._per_minute, self._clock = per_minute, clock
        self._times: dict[str, deque[float]] = {}  # when the requests of the last minute came, by key

    def count(self, key: str) -> None:
        """Count a request of ``key``. Raise ApiError if it exceeds the limit; such a request does not count."""
        if self._per_minute is None:
            return
        now, times = self._clock(), self._times.setdefault(key, deque())
        while times and times[0] <= now - _MINUTE_S:
            times.popleft()
        if len(times) >= self._per_minute:
            wait_s = math.ceil(times[0] + _MINUTE_S - now)
            message = f"this key has {self._per_minute} requests per minute: try again in {wait_s} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=max(wait_s, 1))
        times.append(now)


class QueuePlace:
    """One generation's place in the queue. ``async with`` waits for its turn, and leaves the queue at the end.

    Attributes:
        user: the name by which servers may know the key, see ``Request``.
    """

    def __init__(
        self, leave: Callable[[QueuePlace], None], key: str, user: str = "", turn: asyncio.Event | None = None
    ) -> None:
        """Take the function that gives the place up, and the event that is set when its turn comes."""
        self._leave, self.key, self.user = leave, key, user
        self.turn = turn or asyncio.Event()

    async def __aenter__(self) -> None:
        await self.turn.wait()

    async def __aexit__(self, *_exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the place up, whether its turn has come or not. A second call does nothing."""
        self._leave(self)


class GenerationQueue:
    """A queue that limits how many generations are active. Waiting generations take turns, round robin over keys.

    A key may take at most as many waiting places as stay free beside its own, which is half of them if it waits alone,
    and a third if two keys wait. Its first place is never refused while a place is free. One event loop must make all
    calls.
    """

    def __init__(self, limits: GatewayLimits, *, is_shared: bool = True) -> None:
        """Set the limits; ``is_shared`` says whether there are several keys."""
        self._limits, self._is_shared = limits, is_shared
        self._waiting: OrderedDict[str, deque[QueuePlace]] = OrderedDict()  # the key with the next turn comes first
        self._active: set[QueuePlace] = set()
        self._salt = secrets.token_bytes(16)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_queued(self) -> int:
        return sum(map(len, list(self._waiting.values())))  # a list, as metrics are read by other threads too

    def join(self, key: str, count: int) -> list[QueuePlace]:
        """Return places for ``count`` generations. The caller must leave all of them in the end.

        Raises:
            ApiError: there is no room for all of them, or other keys need the room.
        """
        limits = self._limits
        limits.check_count(count, self._share(limits.max_queued) if self._is_shared else None)
        # The first ones begin at once where active places are free, which is only while nobody waits.
        if not self._fits(key, count - (limits.max_active - self.num_active)):
            message = f"{self.num_active} generations are active and {self.num_queued} wait: try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=_RETRY_S)
        user = ""
        if self._is_shared:  # a name that does not reveal the key, and that differs in each process
            user = hashlib.blake2b(key.encode(), key=self._salt, digest_size=8).hexdigest()
        places = [QueuePlace(self.leave, key, user) for _ in range(count)]
        self._waiting.setdefault(key, deque()).extend(places)
        self._advance()
        return places

    @staticmethod
    def _share(free: int) -> int:
        """Return how many of ``free`` waiting places a key without any may take."""
        return min(free, max(free // 2, 1))

    def _fits(self, key: str, num_waiting: int) -> bool:
        """Return whether ``num_waiting`` more generations of the key may wait."""
        if num_waiting <= 0:
            return True
        own = len(self._waiting.get(key, ())) + num_waiting
        left = self._limits.max_queued - self.num_queued - num_waiting
        return left >= 0 and (not self._is_shared or own <= max(left, 1))

    def leave(self, place: QueuePlace) -> None:
        if place in self._active:
            self._active.remove(place)
            self._advance()
        elif place in self._waiting.get(place.key, ()):
            self._waiting[place.key].remove(place)
            if not self._waiting[place.key]:
                del self._waiting[place.key]

    def _advance(self) -> None:
        while self._waiting and len(self._active) < self._limits.max_active:
            key, places = next(iter(self._waiting.items()))
            place = places.popleft()
            if places:
                self._waiting.move_to_end(key)
            else:
                del self._waiting[key]
            self._active.add(place)
            place.turn.set()


@dataclass(frozen=True)
class QueueLoad:
    """The numbers of generations that are active, and that wait for their turn."""

    num_active: int
    num_queued: int


class RequestAdmission(Protocol):
    """The limits that all requests of a gateway share. One event loop must make all calls of one object.

    ``LocalAdmission`` decides. ``RemoteAdmission`` asks the ``LocalAdmission`` of another process.
    """

    limits: GatewayLimits

    @property
    def own_load(self) -> QueueLoad:
        """Return the load of this process's generations, for any thread."""

    async def count(self, key: str) -> None:
        """Count a request of the key: see ``RateLimit.count``."""

    async def join(self, key: str, count: int, queue: QueueName = "generations") -> list[QueuePlace]:
        """Return places in a queue: see ``GenerationQueue.join``."""

    async def load(self) -> QueueLoad:
        """Return the load of the generations of all processes."""


class LocalAdmission:
    """The limits of a gateway, in the process that decides: the rate of each key, and two fair queues."""

    def __init__(
        self,
        limits: GatewayLimits = DEFAULT_LIMITS,
        *,
        is_shared: bool = False,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the limits.

        Args:
            is_shared: whether there are several keys.
            num_workers: the number of processes that prepare requests, each of which prepares one long request at a
                time. As many long requests may wait as generations may be active and waiting.
            clock: a function that returns seconds.
        """
        self.limits = limits
        self._rate = RateLimit(limits.requests_per_minute, clock)
        waiting = replace(limits, max_active=num_workers, max_queued=limits.max_active + limits.max_queued)
        self._queues: dict[QueueName, GenerationQueue] = {
            "generations": GenerationQueue(limits, is_shared=is_shared),
            "preparations": GenerationQueue(waiting, is_shared=is_shared),
        }

    @property
    def own_load(self) -> QueueLoad:
        queue = self._queues["generations"]
        return QueueLoad(queue.num_active, queue.num_queued)

    async def count(self, key: str) -> None:
        self._rate.count(key)

    async def join(self, key: str, count: int, queue: QueueName = "generations") -> list[QueuePlace]:
        return self._queues[queue].join(key, count)

    async def load(self) -> QueueLoad:
        return self.own_load
