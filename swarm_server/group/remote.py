"""The members of a group on several machines: the leader waits for followers, and followers come to it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from math import inf

from swarm_protocol.net.hosts import host_port, split_address
from swarm_server.group.handshake import HandshakeFailed, Hello, shake_hands
from swarm_server.group.links import GroupEnded, LeaderLinks, MemberLink, shut_down, use_crypto
from swarm_server.group.members import MemberWatch

_logger = logging.getLogger(__name__)
_LOOK_S = 0.2  # between two looks whether the lobby is closed
_MOST_GREETED = 16  # connections at a time that have not proved yet that they have the key
_RETRY_S = 1.0  # between two attempts to reach the leader
_CONNECT_S = 5.0
_ROWS_OF_FREE = 0.8  # of a follower's free memory; it has no keys and values


class RemoteGroup:
    """The leader's side of a group whose followers are on other machines.

    Attributes:
        slow: the name of a follower that has made the group slow for long; empty if there is none.
    """

    def __init__(self, links: LeaderLinks, free_bytes: Sequence[float], is_forced: bool = False) -> None:
        """Lead a group.

        Args:
            free_bytes: the memory that each member has free without blocks, the leader first.
            is_forced: the user wants the group however slow it is, so that no follower is left out for that.
        """
        self.links, self._free_bytes = links, tuple(free_bytes)
        self.slow = ""
        self._watch = None if is_forced else MemberWatch(links)

    @property
    def own_share(self) -> float:
        """Return which part of each block's weights is in this process's memory."""
        return self.links.deal.shares[0]

    def block_bytes_in(self, own_bytes: float) -> float:
        """Return how many bytes of whole blocks the group can hold if the leader's rows may take ``own_bytes``."""
        room_bytes = [own_bytes, *(_ROWS_OF_FREE * free for free in self._free_bytes[1:])]
        return min(room / share for room, share in zip(room_bytes, self.links.deal.shares, strict=True))

    def find_failure(self) -> GroupEnded | None:
        """Return why the group has ended, or should end; None while it works."""
        if self.links.failure is None and not all(link.is_connected() for link in self.links.links):
            return GroupEnded("a member of the group has ended, or cannot be reached any more")
        if self._watch is not None and (slow := self._watch.look()) is not None:
            self.slow = self.links.links[slow - 1].name
            return GroupEnded(f"member {slow + 1} of the group has made it slow for long, and is left out")
        return self.links.failure

    def close(self) -> None:
        """Let the followers go."""
        self.links.close()


class Lobby:
    """The place where followers wait for a place in a group: threads let them in, while groups come and go.

    Attributes:
        address: HOST:PORT, where others reach it.
    """

    def __init__(self, address: str, group_key: bytes, hello: Hello, announced_host: str | None = None) -> None:
        """Listen at HOST:PORT, or at any free port of HOST, and be open.

        ``announced_host``: under which others reach it, if that is another.

        Raises:
            ValueError: that address cannot be had, or this machine cannot encrypt links.
        """
        use_crypto()  # which each connection needs
        self._listener, self._group_key, self._hello = _listening(address), group_key, hello
        host, port = announced_host or split_address(address, 0)[0], self._listener.getsockname()[1]
        self.address, self.name = host_port(host, port), hello.name
        self._links: list[MemberLink] = []
        self._lock = threading.Lock()
        self._greeted: list[socket.socket] = []
        self._is_open = True
        self._closed = threading.Event()
        threading.Thread(target=self._let_in, name="lobby of the group", daemon=True).start()

    def open(self) -> None:
        """Let followers in."""
        self._is_open = True

    def shut(self) -> None:
        """Let nobody in until it is opened, and let all followers go that wait, or that are being greeted."""
        with self._lock:
            self._is_open, greeted = False, list(self._greeted)
        for connection in greeted:
            shut_down(connection)
        for link in self.waiting():
            link.close()

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
        self.shut()

    def _let_in(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    connection, (host, *_) = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # such as too many open files
                    _logger.warning("nobody is let into the group at this moment: %s", error)
                    time.sleep(_RETRY_S)
                    continue
                self._receive(connection, host)

    def _receive(self, connection: socket.socket, host: str) -> None:
        """Greet the other end in a thread of its own, because it may be silent. The oldest of too many must go."""
        with self._lock:  # so that ``shut`` either prevents this greeting or ends it
            is_open, too_many = self._is_open, self._greeted[: max(0, len(self._greeted) + 1 - _MOST_GREETED)]
            if is_open:
                self._greeted.append(connection)
        if not is_open:
            connection.close()
            return
        for silent in too_many:
            shut_down(silent)
        try:
            threading.Thread(target=self._greet, args=(connection, host), daemon=True).start()
        except RuntimeError:  # the system gives no thread
            self._end_greeting(connection)
            connection.close()

    def _end_greeting(self, connection: socket.socket) -> None:
        with self._lock:
            self._greeted.remove(connection)

    def _greet(self, connection: socket.socket, host: str) -> None:
        try:
            link = shake_hands(connection, self._group_key, self._hello, leads=True, host=host)
        except (HandshakeFailed, GroupEnded, OSError, ValueError) as error:
            connection.close()
            if self._is_open:  # else the lobby has ended the greeting
                _logger.warning("%s is not let into the group: %s", host, error)
            return
        finally:
            self._end_greeting(connection)
        with self._lock:
            if self._is_open:
                self._links.append(link)
                _logger.info("%s has come to be a member of the group", host)
                return
        link.close()


def _listening(address: str) -> socket.socket:
    host, port = split_address(address, 0)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        takes_both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=takes_both)
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
        except OSError as error:
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:  # not only at this moment
                raise ValueError(f"the leader's host {address} is unknown: {error.strerror}") from None
            if not said:
                _logger.info("no leader of a group answers at %s (%s); this follower waits for it", address, error)
            said = True
            time.sleep(_RETRY_S)
            continue
        try:
            return shake_hands(connection, group_key, hello, leads=False)
        except (GroupEnded, OSError) as error:
            connection.close()
            if not said:
                _logger.info("the leader at %s lets nobody in at this moment: %s", address, error)
            said = True
            time.sleep(_RETRY_S)
        except HandshakeFailed as error:
            connection.close()
            raise HandshakeFailed(f"cannot follow {address}: {error}") from None
    raise GroupEnded(f"no leader of the group answers at {address}")
