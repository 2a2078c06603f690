"""Connections between the leader and the followers of a group, which the compiled kernel reads and writes itself."""

from __future__ import annotations

import _ssl
import ctypes
import ctypes.util
import functools
import mmap
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_char_p, c_double, c_int, c_long, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.kernels.library import kernel, with_functions
from swarm_models.quantization import Packed
from swarm_protocol.errors import PeerUnavailable
from swarm_server.group.group_key import KEY_BYTES

LIMIT_S = 10.0  # the longest time in which a member neither sends nor takes a byte that is due
MOST_WEIGHTS = 8  # of one request, as in group.h
_WHOLE = 1 << 16  # the sum of all members' shares, as in group.cpp
ECHO = -1  # the kind of a request for the same numbers, which the kernel answers

_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "swarm_ring_bytes": (c_long, []),
    "swarm_request_bytes": (c_long, []),
    "swarm_open_link": (c_void_p, [c_int, c_void_p, c_int, c_double]),
    "swarm_close_link": (None, [c_void_p]),
    "swarm_limit_link": (None, [c_void_p, c_double]),
    "swarm_use_crypto": (None, [c_void_p]),
    "swarm_seal_link": (c_int, [c_void_p, c_char_p, c_char_p]),
    "swarm_link_send": (c_int, [c_void_p, c_void_p, c_long]),
    "swarm_link_receive": (c_int, [c_void_p, c_void_p, c_long]),
    "swarm_open_group": (c_void_p, [c_void_p, c_int, c_void_p]),
    "swarm_close_group": (None, [c_void_p]),
    "swarm_group_times": (None, [c_void_p, c_void_p]),
    "swarm_deal_outputs": (None, [c_long, c_void_p, c_int, c_void_p]),
    "swarm_group_matmul": (
        c_int,
        [c_void_p, c_int, c_void_p, c_long, c_long, c_void_p, c_void_p, c_void_p, c_long, c_int, c_int],
    ),
    "swarm_follow": (c_int, [c_void_p, c_void_p, c_long, c_void_p, c_int, c_int]),
}
_CRYPTO = (  # functions of OpenSSL's libcrypto, in the order of `Crypto` in sealing.h
    *("EVP_CIPHER_CTX_new", "EVP_CIPHER_CTX_free", "EVP_aes_256_gcm", "EVP_CipherInit_ex", "EVP_CipherUpdate"),
    *("EVP_CipherFinal_ex", "EVP_CIPHER_CTX_ctrl"),
)
_TOO_SLOW, _NOT_SEALED = -2, -5
_FAILURES = {
    -1: "a member of the group has ended",
    _TOO_SLOW: "a member of the group has not answered for {limit_s:g} seconds",
    -3: "a member of the group has no memory for a product",
    -4: "a member of the group sent something that is not understood",
    _NOT_SEALED: "a member of the group sent bytes that the group's key has not sealed",
}


class GroupEnded(PeerUnavailable):
    """A member of the group is missing, so none of the group's products can be computed any more."""


class NotSealed(GroupEnded):
    """Bytes came through an encrypted link that the other end's key has not sealed."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions; None if there are none here, as on Windows or without a compiler."""
    found = with_functions(_SIGNATURES)
    return found if found is not None and found.swarm_request_bytes() == ctypes.sizeof(_Words) else None


def _require_library() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise ValueError("a group needs the compiled kernel, which is not there: reinstall where there is a compiler")
    return loaded


@functools.cache
def use_crypto() -> None:
    """Give OpenSSL's functions to the kernel. Raise ValueError if there are none in this process, or no kernel."""
    library_here = _require_library()
    for path in (getattr(_ssl, "__file__", None), ctypes.util.find_library("crypto")):
        try:
            loaded = ctypes.CDLL(path)
            addresses = [ctypes.cast(getattr(loaded, name), c_void_p).value for name in _CRYPTO]
        except (OSError, AttributeError):  # Python's own library is elsewhere, or hides its functions
            continue
        library_here.swarm_use_crypto((c_void_p * len(addresses))(*addresses))
        return
    raise ValueError(
        "the links of a group between machines are encrypted by libcrypto, which is not there: install OpenSSL"
    )


def _require(outcome: int, limit_s: float = LIMIT_S) -> None:
    if outcome:
        kind = NotSealed if outcome == _NOT_SEALED else GroupEnded
        failure = _FAILURES.get(outcome, f"a member of the group reports failure {outcome}")
        raise kind(failure.format(limit_s=limit_s))


class _Words(ctypes.Structure):
    """``Request`` of group.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("wanted", "sequence", "threads", "rows", "width", "count")),
        ("numbers", ctypes.c_int32 * MOST_WEIGHTS),
    ]


@dataclass(frozen=True)
class MemberRequest:
    """A request of the leader that is no product: ``wanted`` is its kind, and ``rows`` and ``number`` its arguments."""

    wanted: int
    rows: int = 0
    number: int = 0


@dataclass(frozen=True)
class LinkEnds:
    """The sockets and the memory of both ends of a link. They can be given to a process that this one starts."""

    leader: socket.socket
    follower: socket.socket
    memory: Any  # a file, two rings long, without a name

    @staticmethod
    def on_this_machine() -> LinkEnds:
        """Return the ends of a link through shared memory."""
        directory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        memory = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (kept open by both ends)
        memory.truncate(2 * _require_library().swarm_ring_bytes())
        return LinkEnds(*socket.socketpair(), memory)


class MemberLink:
    """One end of a connection between two processes.

    Attributes:
        name: the other member's name; empty on one machine.
        host: the other member's machine; empty on one machine.
        failure: what the other member could not do, and why; empty if it has not failed.
    """

    def __init__(
        self, connection: socket.socket, memory_file: int | None, member: int, limit_s: float = LIMIT_S
    ) -> None:
        """Open an end. ``memory_file``: the shared memory; None: bytes go through the socket. ``member``: 0 or 1."""
        self.name = self.host = self.failure = ""
        self.has_loaded = False
        self._library = _require_library()
        self._connection = connection
        self._memory, address = None, None
        if memory_file is not None:
            self._memory = mmap.mmap(memory_file, 2 * self._library.swarm_ring_bytes())
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        else:
            _prepare(connection)
        self._limit_s = limit_s
        self.handle: int = self._library.swarm_open_link(connection.fileno(), address, member, limit_s)

    def close(self) -> None:
        """Close the connection, which both ends notice, also in the middle of a request."""
        shut_down(self._connection)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.swarm_close_link(self.handle)

    def limit(self, limit_s: float = LIMIT_S) -> None:
        """Set how long the other end may neither send nor take a byte that is due."""
        self._limit_s = limit_s
        self._library.swarm_limit_link(self.handle, limit_s)

    def seal(self, sending_key: bytes, receiving_key: bytes) -> None:
        """Encrypt and authenticate all bytes from now on, with keys of 32 bytes that nothing else has used.

        Raises:
            ValueError: there is no libcrypto.
        """
        use_crypto()
        assert len(sending_key) == len(receiving_key) == KEY_BYTES
        _require(self._library.swarm_seal_link(self.handle, sending_key, receiving_key))

    def accept(self, name: str, host: str) -> None:
        """Record the other member's name and machine, and end the shorter time limit of the handshake."""
        self.name, self.host = name, host
        self.limit(LIMIT_S)

    def loaded(self) -> None:
        """Record that the other member has loaded its rows of a span."""
        self.has_loaded = True

    @contextmanager
    def blamed(self, work: str) -> Iterator[None]:
        """Keep each GroupEnded that is raised within this context as the other member's failure, and name it there."""
        try:
            yield
        except GroupEnded as error:
            member = f"the member at {self.host}" if self.host else "a member of the group"
            self.failure = f"{member} cannot {work}: {error}"
            raise GroupEnded(self.failure) from None

    def is_connected(self) -> bool:
        """Return whether the other end has not closed the connection, as far as the system knows."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor; raise GroupEnded if the other end is gone."""
        self._send(tensor.data_ptr(), tensor.nbytes)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor; raise GroupEnded if the other end is gone."""
        _require(self._library.swarm_link_receive(self.handle, tensor.data_ptr(), tensor.nbytes), self._limit_s)

    def _send(self, address: int, size_bytes: int) -> None:
        _require(self._library.swarm_link_send(self.handle, address, size_bytes), self._limit_s)

    def ask(self, request: MemberRequest) -> None:
        """Send a request that is no product."""
        words = _Words(wanted=request.wanted, rows=request.rows, count=1)
        words.numbers[0] = request.number
        self._send(ctypes.addressof(words), ctypes.sizeof(words))

    def exchange_s(self, numbers: int) -> float:
        """Return the time until so many fp32 numbers have gone to a follower and back, in seconds."""
        words, there, back = _Words(wanted=ECHO, rows=1, width=numbers), torch.zeros(numbers), torch.empty(numbers)
        start = time.perf_counter()
        self._send(ctypes.addressof(words), ctypes.sizeof(words))
        self.send(there)
        self.receive(back)
        return time.perf_counter() - start

    def follow(self, weights: OwnWeights) -> MemberRequest:
        """Answer requests for products and echoes until there is another request, and return that.

        The number of threads is the leader's on one machine, and this process's own on another.
        """
        words, compiled = _Words(), kernel()
        assert compiled is not None
        threads = torch.get_num_threads() if self._memory is None else 0
        arguments = weights.address, len(weights), ctypes.addressof(words), compiled.isa, threads
        _require(self._library.swarm_follow(self.handle, *arguments), self._limit_s)
        return MemberRequest(words.wanted, words.rows, words.numbers[0])


def shut_down(connection: socket.socket) -> None:
    """End a connection in both directions, whatever its ends are doing. They may have closed it already."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _prepare(connection: socket.socket) -> None:
    """Send everything at once, and notice within half a minute that the other machine is gone while nothing is sent."""
    connection.settimeout(None)  # the kernel has limits of its own
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _OwnWeight(ctypes.Structure):
    """``OwnWeight`` of group.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("out", "channels", "packed", "scale")]


class OwnWeights:
    """A follower's rows of all weights, by number."""

    def __init__(self, weights: Sequence[Packed]) -> None:
        self.weights = tuple(weights)
        self._table = (_OwnWeight * max(1, len(weights)))(*map(_own_weight, weights))
        self.address = ctypes.addressof(self._table)

    def __len__(self) -> int:
        return len(self.weights)


def _own_weight(weight: Packed) -> _OwnWeight:
    packed, scale = addresses(weight)
    return _OwnWeight(*weight.shape, packed, scale or 0)


def addresses(weight: Packed) -> tuple[int, int | None]:
    """Return the addresses of the packed weight and of its scales; int4 has no separate scales."""
    if isinstance(weight, KernelWeight):
        return weight.address.packed, weight.address.scale
    return weight.address, None


class Deal:
    """The shares of the members of a group in the rows of every weight.

    Attributes:
        ends: [members] int32; for each member, the leader first, the sum of its share and those before it, in 65536ths.
    """

    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends

    @classmethod
    def by_speed(cls, speeds: Sequence[float]) -> Deal:
        """Return shares in proportion to the speeds of the members, the leader first."""
        sums = torch.tensor(speeds, dtype=torch.float64).cumsum(0)
        return cls((sums / sums[-1] * _WHOLE).round().to(torch.int32))

    @property
    def members(self) -> int:
        """Return the number of members, the leader included."""
        return len(self.ends)

    @property
    def shares(self) -> list[float]:
        """Return each member's share, between 0 and 1."""
        return [float(share) / _WHOLE for share in self.ends.diff(prepend=torch.zeros(1, dtype=torch.int32))]

    def rows_of(self, num_rows: int, member: int) -> slice:
        """Return the rows of a weight that a member holds: whole strips of 64 rows, at least one.

        If there are fewer strips than members, the leader has all rows.
        """
        firsts = (c_long * (self.members + 1))()
        _require_library().swarm_deal_outputs(num_rows, self.ends.data_ptr(), self.members, firsts)
        return slice(firsts[member], firsts[member + 1])


class LeaderLinks:
    """The leader's links to its followers.

    Attributes:
        deal: the members' shares in the rows of every weight.
        failure: why the group has ended; None while it works.
    """

    def __init__(self, links: Sequence[MemberLink], deal: Deal) -> None:
        self.links, self.deal = tuple(links), deal
        self.failure: GroupEnded | None = None
        self._library = _require_library()
        handles = (c_void_p * len(links))(*[link.handle for link in links])
        self.handle: int = self._library.swarm_open_group(handles, len(links), deal.ends.data_ptr())

    @property
    def members(self) -> int:
        """Return the number of members, the leader included."""
        return len(self.links) + 1

    def times_s(self) -> list[float]:
        """Return the time in all products so far: of the leader's own rows, then of waiting for each follower."""
        spent_ns = (ctypes.c_int64 * self.members)()
        self._library.swarm_group_times(self.handle, spent_ns)
        return [each / 1e9 for each in spent_ns]

    def close(self) -> None:
        for link in self.links:
            link.close()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.swarm_close_group(self.handle)

    def matmul(self, number: int, x: torch.Tensor, own: Packed, y: torch.Tensor) -> None:
        """Multiply x: [rows, in] fp32 by the weight of this number, of which ``own`` are the leader's rows -> y."""
        compiled = kernel()
        assert compiled is not None
        packed, scale = addresses(own)
        arguments = self.handle, number, x.data_ptr(), *x.shape, packed, scale, y.data_ptr(), y.shape[1]
        with self.exchange():
            _require(self._library.swarm_group_matmul(*arguments, compiled.isa, torch.get_num_threads()))

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Send requests and receive their answers within this context. Raise GroupEnded if the group has ended.

        An error within it ends the group for good: answers that come later would be taken for those of other requests.
        """
        if self.failure is not None:
            raise GroupEnded(str(self.failure))
        try:
            yield
        except BaseException as error:  # raised again
            own = "" if isinstance(error, GroupEnded) else "the leader of the group failed: "
            self.failure = GroupEnded(f"{own}{error}")  # a new one: the frames of the error keep a batch in memory
            raise
