"""The members of a group on several machines: the leader waits for followers, and followers come to it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from math import inf

from swarm_protocol.net.hosts import split_address
from swarm_server.group.handshake import HandshakeFailed, Hello, shake_hands
from swarm_server.group.links import GroupEnded, LeaderLinks, MemberLink
from swarm_server.group.members import MemberWatch

_logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # between two looks whether the lobby is closed
_RETRY_S = 1.0  # between two attempts to reach the leader
_CONNECT_S = 5.0
_ROWS_OF_FREE = 0.8  # of a follower's free memory; it has no keys and values


class RemoteGroup:
    """The leader's side of a group whose followers are on other machines.

    Attributes:
        links: the links to the followers.
        slow: the name of a follower that has made the group slow for long; empty if there is none.
    """

    def __init__(self, links: LeaderLinks, free_bytes: Sequence[float]) -> None:
        """Lead a group. ``free_bytes``: the memory that each member has free without blocks, the leader first."""
        self.links, self._free_bytes = links, tuple(free_bytes)
        self.slow = ""
        self._watch = MemberWatch(links)

    @property
    def own_share(self) -> float:
        """Return which part of each block's weights is in this process's memory."""
        return self.links.deal.shares[0]

    def block_bytes_in(self, own_bytes: float) -> float:
        """Return how many bytes of whole blocks the group can hold if the leader's rows may take ``own_bytes``."""
        room_bytes = [own_bytes, *(_ROWS_OF_FREE * free for free in self._free_bytes[1:])]
        return min(room / share for room, share in zip(room_bytes, self.links.deal.shares, strict=True))

    @property
    def failure(self) -> GroupEnded | None:
        """Return why the group has ended, or should end; None while it works."""
        if self.links.failure is None and not all(link.is_connected() for link in self.links.links):
            return GroupEnded("a member of the group has ended, or cannot be reached any more")
        if (slow := self._watch.look()) is not None:
            self.slow = self.links.links[slow - 1].name
            return GroupEnded(f"member {slow + 1} of the group has made it slow for long, and is left out")
        return self.links.failure

    def close(self) -> None:
        """Let the followers go."""
        self.links.close()


class Lobby:
    """The place where followers wait for a place in a group: a thread lets them in, while groups come and go.

    Attributes:
        address: HOST:PORT.
        name: this process's name in the group.
    """

    def __init__(self, address: str, group_key: bytes, hello: Hello) -> None:
        """Listen at HOST:PORT. Raise ValueError if that is not possible."""
        self.address, self.name = address, hello.name
        self._listener, self._group_key, self._hello = _listening(address), group_key, hello
        self._links: list[MemberLink] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._let_in, name="lobby of the group", daemon=True).start()

    def waiting(self) -> list[MemberLink]:
        """Return the links to all followers that wait, in the order in which they came."""
        with self._lock:
            self._links = [link for link in self._links if link.is_connected()]
            return list(self._links)

    def take(self, links: Sequence[MemberLink]) -> None:
        """Let these followers wait no longer: they have a place in a group, or have failed."""
        with self._lock:
            self._links = [link for link in self._links if link not in links]

    def close(self) -> None:
        """Let nobody in any more, and let all followers go."""
        self._closed.set()
        for link in self.waiting():
            link.close()

    def _let_in(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                if (link := self._next()) is not None:
                    with self._lock:
                        self._links.append(link)

    def _next(self) -> MemberLink | None:
        try:
            connection, (host, *_) = self._listener.accept()
        except TimeoutError:
            return None
        try:
            link = shake_hands(connection, self._group_key, self._hello, leads=True)
        except (HandshakeFailed, GroupEnded) as error:
            connection.close()
            _logger.warning("%s is not let into the group: %s", host, error)
            return None
        _logger.info("%s has come to be a member of the group", host)
        return link


def _listening(address: str) -> socket.socket:
    host, port = split_address(address, 0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"cannot wait for members of the group at {address}: {error.strerror}; expected a free port at an address "
            "of this machine"
        ) from None
    listener.settimeout(_LOOK_S)
    return listener


def connected_to_leader(address: str, group_key: bytes, hello: Hello, limit_s: float = inf) -> MemberLink:
    """Return the link to the leader at HOST:PORT. Wait for it as long as ``limit_s``.

    Raises:
        HandshakeFailed: the leader has another key, or computes otherwise.
        ValueError: the host has no address.
        GroupEnded: there is no leader at the end of that time.
    """
    said, until = False, time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            connection = socket.create_connection(split_address(address, 0), _CONNECT_S)
        except socket.gaierror as error:
            raise ValueError(f"the leader's host {address} is unknown: {error.strerror}") from None
        except OSError as error:
            if not said:
                _logger.info("no leader of a group answers at %s (%s); this follower waits for it", address, error)
            said = True
            time.sleep(_RETRY_S)
            continue
        try:
            return shake_hands(connection, group_key, hello, leads=False)
        except GroupEnded as error:
            connection.close()
            _logger.info("the leader at %s: %s", address, error)
            time.sleep(_RETRY_S)
        except HandshakeFailed as error:
            connection.close()
            raise HandshakeFailed(f"cannot follow {address}: {error}") from None
    raise GroupEnded(f"no leader of the group answers at {address}")
