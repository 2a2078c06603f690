"""The members of a group on several machines: the leader waits for followers, and followers come to it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from swarm_protocol.net.hosts import split_address
from swarm_server.group.handshake import HandshakeFailed, Hello, shake_hands
from swarm_server.group.links import GroupEnded, LeaderLinks, MemberLink

_logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # between two looks whether the leader still wants followers
_RETRY_S = 1.0  # between two attempts to reach the leader
_CONNECT_S = 5.0
_ROWS_OF_FREE = 0.8  # of a follower's free memory; it has no keys and values


class RemoteGroup:
    """The leader's side of a group whose followers are on other machines.

    Attributes:
        links: the links to the followers.
    """

    def __init__(self, links: LeaderLinks, free_bytes: Sequence[float]) -> None:
        """Lead a group. ``free_bytes``: the memory that each member has free without blocks, the leader first."""
        self.links, self._free_bytes = links, tuple(free_bytes)

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
        """Return why the group has ended; None while it works."""
        if self.links.failure is None and not all(link.is_connected() for link in self.links.links):
            return GroupEnded("a member of the group has ended, or cannot be reached any more")
        return self.links.failure

    def close(self) -> None:
        """Let the followers go."""
        self.links.close()


class Lobby:
    """The followers that have come to the leader, and have no place in a group yet.

    Attributes:
        links: the links to them, in the order in which they came.
    """

    def __init__(self, listener: socket.socket, group_key: bytes, hello: Hello) -> None:
        self.links: list[MemberLink] = []
        self._listener, self._group_key, self._hello = listener, group_key, hello

    def gather(self, count: int, still_wanted: Callable[[], bool]) -> None:
        """Wait until so many followers are there at the same time. Raise GroupEnded if they are not wanted any more."""
        while len(self.links) < count:
            self.look()
            if not still_wanted():
                raise GroupEnded("the server ends before all members of its group are there")

    def look(self) -> None:
        """Let in whoever comes within a moment, and forget who has gone."""
        if (link := self._next()) is not None:
            self.links.append(link)
        self.links = [link for link in self.links if link.is_connected()]

    def keep(self, chosen: Sequence[int]) -> None:
        """Let all followers go but those with these numbers."""
        for number, link in enumerate(self.links):
            if number not in chosen:
                link.close()
        self.links = [self.links[number] for number in chosen]

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


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """Yield a socket at HOST:PORT to which followers connect. Raise ValueError if it cannot be had."""
    host, port = split_address(address, 0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ValueError(
            f"cannot wait for members of the group at {address}: {error.strerror}; expected a free port at an address "
            "of this machine"
        ) from None
    with listener:
        listener.settimeout(_LOOK_S)
        yield listener


def connected_to_leader(address: str, group_key: bytes, hello: Hello) -> MemberLink:
    """Return the link to the leader at HOST:PORT. Wait as long as there is no leader.

    Raises:
        HandshakeFailed: the leader has another key, or computes otherwise.
        ValueError: the host has no address.
    """
    said = False
    while True:
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
