"""Who may ask and for how much, whose turn it is, and how all others are refused."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import math
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_RETRY_S = 5  # after which somebody who found the queue full may try again
_MINUTE_S = 60.0


class ApiError(Exception):
    """What a request is answered with instead, in OpenAI's shape."""

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
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read_keys(path: Path) -> tuple[str, ...]:
    """One in each line; raises ValueError if there are none, or a line is no key."""
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
    """The key in an Authorization header. Raises ApiError if it is none of them."""
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise ApiError(401, "there is no API key: expected `Authorization: Bearer KEY`", code="invalid_api_key")
    found = [key for key in keys if hmac.compare_digest(key.encode(), given.strip().encode())]  # compares with all
    if not found:
        raise ApiError(401, "the API key is not known here", code="invalid_api_key")
    return found[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is called so."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Limits:
    """Raises ValueError at construction if a field is out of its range."""

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


DEFAULT_LIMITS = Limits()


class RateLimit:
    """So many requests of each key within any 60 s."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        """``clock``: seconds."""
        self._per_minute, self._clock = per_minute, clock
        self._times: dict[str, deque[float]] = {}  # of the requests of the last minute

    def count(self, key: str) -> None:
        """Raises ApiError if it is one too many, which then does not count."""
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


class Place:
    """Of one generation in the queue. ``async with`` waits for its turn, and makes room for the next at the end.

    Attributes:
        user: what servers may know the key by, see ``Request``.
    """

    def __init__(self, queue: FairQueue, key: str, user: str = "") -> None:
        self._queue, self.key, self.user = queue, key, user
        self.turn = asyncio.Event()

    async def __aenter__(self) -> None:
        await self.turn.wait()

    async def __aexit__(self, *_exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Gives the place up, whether its turn has come or not; nothing happens the second time."""
        self._queue.leave(self)


class FairQueue:
    """Lets so many generations be active; the turns of those that wait go round robin over keys.

    A key may have as many places to wait as it leaves free, or one: half of them if it is alone, a third if there are
    two, and the first place of a key is never refused while there is one. For one event loop.
    """

    def __init__(self, limits: Limits, *, is_shared: bool = True) -> None:
        """``is_shared``: there are several keys."""
        self._limits, self._is_shared = limits, is_shared
        self._waiting: OrderedDict[str, deque[Place]] = OrderedDict()  # the key whose turn it is first
        self._active: set[Place] = set()
        self._salt = secrets.token_bytes(16)

    @property
    def num_active(self) -> int:
        return len(self._active)

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._waiting.values()))

    def join(self, key: str, count: int) -> list[Place]:
        """Places for so many generations, which must all be left in the end.

        Raises:
            ApiError: there is no room for all of them, or other keys need it.
        """
        limits = self._limits
        most = limits.max_active + (self._share(limits.max_queued) if self._is_shared else limits.max_queued)
        if count > most:
            message = f"the request asks for {count} generations: this server takes {most} at most"
            raise ApiError(400, message, param="n")
        if not self._fits(key, count - (limits.max_active - self.num_active)):
            message = f"{self.num_active} generations are active and {self.num_queued} wait: try again later"
            raise ApiError(429, message, code="queue_full", retry_after_s=_RETRY_S)
        user = self._user_of(key)
        places = [Place(self, key, user) for _ in range(count)]
        self._waiting.setdefault(key, deque()).extend(places)
        self._advance()
        return places

    def _user_of(self, key: str) -> str:
        """Return a name that says nothing about the key, and is another one in each process."""
        return hashlib.blake2b(key.encode(), key=self._salt, digest_size=8).hexdigest() if self._is_shared else ""

    @staticmethod
    def _share(free: int) -> int:
        """Of so many places to wait, what a key that has none may take."""
        return min(free, max(free // 2, 1))

    def _fits(self, key: str, num_waiting: int) -> bool:
        """Whether so many more of the key's may wait."""
        if num_waiting <= 0:
            return True
        own = len(self._waiting.get(key, ())) + num_waiting
        left = self._limits.max_queued - self.num_queued - num_waiting
        return left >= 0 and (not self._is_shared or own <= max(left, 1))

    def leave(self, place: Place) -> None:
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
