"""The life of a follower: a process that holds rows of the blocks of a leader on another machine."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from math import inf
from types import FrameType

from swarm_protocol.process import signals
from swarm_server.group.handshake import Deadline, HandshakeFailed, Hello
from swarm_server.group.links import GroupEnded
from swarm_server.group.members import FollowerLeftOut, LoadSpan, MakeLoader, follow
from swarm_server.group.remote import connected_to_leader

_logger = logging.getLogger(__name__)
_WAIT_S = 300.0  # for a place in the group of a leader that the swarm has named, which may be another by now


class Follower:
    """A follower of one leader, which holds rows of the leader's blocks."""

    def __init__(self, address: str, key: bytes, hello: Hello, make_loader: MakeLoader) -> None:
        """Prepare to follow the leader at HOST:PORT with the group's ``key``. ``hello``: how this process computes."""
        self._address, self._key, self._hello, self._make_loader = address, key, hello, make_loader

    def follow_for_ever(self) -> None:
        """Follow until a signal ends this process. When the leader ends, wait until it is there again.

        Raises:
            FollowerLeftOut: the group is faster without this member.
            ValueError, SwarmError: the model, the key or the leader cannot be used; one sentence says why.
        """

        def work() -> None:
            with self._make_loader() as load:  # in this thread: OpenMP has a number of threads for each
                while True:
                    self._follow_once(load, inf)
                    _logger.info("the group has ended; this follower waits for the leader at %s", self._address)

        _until_signal(work)

    def follow(self, limit_s: float) -> bool:
        """Follow until the leader ends, does not answer for ``limit_s``, or gives no place for minutes.

        Return False after a signal.

        Raises:
            ValueError, SwarmError: as ``follow_for_ever``.
        """

        def work() -> None:
            with self._make_loader() as load:
                self._follow_once(load, limit_s, _WAIT_S)

        try:
            return _until_signal(work)
        except GroupEnded as error:
            _logger.info("%s", error)
            return True

    def _follow_once(self, load: LoadSpan, limit_s: float, wait_s: float = threading.TIMEOUT_MAX) -> None:
        """Follow until the leader ends, or has given no place for ``wait_s``."""
        link = connected_to_leader(self._address, self._key, self._hello, limit_s)
        _logger.info("waiting for a place in the group of the leader at %s", self._address)
        deadline = Deadline(wait_s, link.close)

        def say(place: str) -> None:
            deadline.cancel()
            print(f"following leader={self._address} {place}", flush=True)

        try:
            with deadline:
                follow(load, link, say)
        except (HandshakeFailed, FollowerLeftOut) as error:
            raise type(error)(f"cannot follow {self._address}: {error}") from None
        finally:
            link.close()


def _until_signal(work: Callable[[], None]) -> bool:
    """Run ``work`` in a thread, because compiled code does not see signals. Return False if a signal comes earlier.

    What ``work`` raises is raised. Afterwards the process hears signals as it did before.
    """
    failures: list[BaseException] = []
    done, signalled = threading.Event(), threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again in the main thread
            failures.append(error)
        done.set()

    def end(_number: int, _frame: FrameType | None) -> None:
        signalled.set()
        done.set()

    before = {number: signal.signal(number, end) for number in signals.all_ending_signals()}
    try:
        threading.Thread(target=run, daemon=True).start()
        done.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signalled.is_set():
        return False
    if failures:
        raise failures[0]
    return True
