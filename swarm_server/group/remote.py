"""The members of a group on several machines: the leader waits for followers, and followers come to it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swarm_protocol.failures import undone_on_error
from swarm_protocol.net.hosts import split_address
from swarm_server.group.handshake import HandshakeFailed, Hello, shake_hands
from swarm_server.group.links import GroupEnded, LeaderLinks, MemberLink

_logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # between two looks whether the leader still wants followers
_RETRY_S = 1.0  # between two attempts to reach the leader
_CONNECT_S = 5.0


class RemoteGroup:
    """The leader's side of a group whose followers are on other machines.

    Attributes:
        links: the links to the followers.
    """

    def __init__(
        self, listener: socket.socket, group_key: bytes, hello: Hello, still_wanted: Callable[[], bool]
    ) -> None:
        """Wait until all of ``hello.members`` are there; the leader is one of them.

        Raises:
            GroupEnded: the group is not wanted any more.
        """
        self._group_key, self._hello = group_key, hello
        links: dict[int, MemberLink] = {}

        def close_all() -> None:
            for link in links.values():
                link.close()

        with undone_on_error(close_all):
            while missing := [member for member in range(1, hello.members) if member not in links]:
                if (link := self._next(listener, missing[0])) is not None:
                    links[missing[0]] = link
                links = {member: link for member, link in links.items() if link.is_connected()}
                if not still_wanted():
                    raise GroupEnded("the server ends before all members of its group are there")
        self.links = LeaderLinks([links[member] for member in sorted(links)])

    def _next(self, listener: socket.socket, member: int) -> MemberLink | None:
        try:
            connection, (host, *_) = listener.accept()
        except TimeoutError:
            return None
        try:
            link, _ = shake_hands(connection, self._group_key, self._hello.of_member(member), leads=True)
        except (HandshakeFailed, GroupEnded) as error:
            connection.close()
            _logger.warning("%s is not let into the group: %s", host, error)
            return None
        _logger.info("%s is member %d of the %d of the group", host, member + 1, self._hello.members)
        return link

    @property
    def failure(self) -> GroupEnded | None:
        """Return why the group has ended; None while it works."""
        if self.links.failure is None and not all(link.is_connected() for link in self.links.links):
            return GroupEnded("a member of the group has ended, or cannot be reached any more")
        return self.links.failure

    def close(self) -> None:
        """Let the followers go."""
        self.links.close()


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


def connected_to_leader(address: str, group_key: bytes, hello: Hello) -> tuple[MemberLink, Hello]:
    """Return the link to the leader at HOST:PORT, and its terms. Wait as long as there is no leader.

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
