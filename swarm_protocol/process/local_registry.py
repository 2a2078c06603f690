"""The registry in the user's cache directory, where peers of one machine find their swarm without flags.

The directory may be shared with containers and other machines, where a pid is meaningless and a loopback address leads
elsewhere. Therefore an entry names the host of its process and the network in which its addresses are valid, and the
server renews the entry as long as it lives.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO

import platformdirs

from swarm_protocol.atomic_file import PARTIAL_SUFFIX, written_atomically
from swarm_protocol.file_lock import try_lock
from swarm_protocol.system import boot_id
from swarm_protocol.untrusted.json_file import parse_object

DEFAULT_SWARM = "default"
RENEW_S = 5.0
FRESH_S = 60.0  # a server of another host that has not renewed its entry for this long is probably dead
STALE_S = 600.0  # such an entry is deleted after this time; a server that wakes up writes it again
_LOCK_POLL_S = 0.05
_PROCESSES = Path("/proc")  # on Linux
_MAX_ENTRY_BYTES = 1 << 16
_LOOPBACK = re.compile(r"/(?:ip4/127\.|ip6/::1/|dns[46]?/localhost/)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_name(name: str, what: str = "swarm") -> str:
    """Return the name of ``what``; raise ValueError unless it is a valid directory name on any system."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} name {name!r} is not usable: expected 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class RegistryEntry:
    """The registry entry of one server.

    Attributes:
        addresses: multiaddrs that may lead to the server from here; empty if it listens only on another network's
            loopback.
        is_alive: the process lives, or has renewed the entry recently. Otherwise the server may be dead.
    """

    peer_id: str
    addresses: tuple[str, ...]
    is_alive: bool


class LocalRegistry:
    """The entries of a named swarm, one file per running server.

    An entry is deleted by its server, or by other processes when its process is certainly gone, or when it is stale.
    """

    def __init__(self, swarm: str = DEFAULT_SWARM, directory: Path | None = None) -> None:
        directory = directory or platformdirs.user_cache_path("swarm") / "swarms"
        self.swarm = checked_name(swarm)
        self._directory = directory / swarm

    @asynccontextmanager
    async def locked(self, timeout_s: float = inf) -> AsyncIterator[bool]:
        """Hold a lock while a server decides whether to join or to start the swarm, so that two do not both start it.

        Yields False, without the lock, after ``timeout_s`` (the holder may be frozen), or if the directory is unusable.
        """
        deadline = time.monotonic() + timeout_s
        with ExitStack() as opened:
            is_held = False
            with suppress(OSError):
                lock = opened.enter_context(self._open_lock())
                while not (is_held := try_lock(lock) and self._has(lock)) and time.monotonic() < deadline:
                    if self._has(lock):  # another process holds the lock: flock itself would block the event loop
                        await asyncio.sleep(_LOCK_POLL_S)
                    else:  # the directory was removed meanwhile
                        lock = opened.enter_context(self._open_lock())
            yield is_held

    def _open_lock(self) -> IO[str]:
        self._directory.mkdir(parents=True, exist_ok=True)
        return open(self._directory / "lock", "w")

    def _has(self, lock: IO[str]) -> bool:
        """Return whether the open lock file is still the directory's lock file."""
        try:
            return os.path.samestat(os.fstat(lock.fileno()), (self._directory / "lock").stat())
        except FileNotFoundError:
            return False

    def remove_if_ended(self) -> None:
        """Remove the directory if no server of the swarm is left, and no server is about to start."""
        with suppress(OSError), self._open_lock() as lock:
            if try_lock(lock) and self._has(lock) and not self.servers():
                for pattern in (f".*{PARTIAL_SUFFIX}", "*.[0-9]*"):  # from a killed process, or from an older version
                    for partial in self._directory.glob(pattern):
                        partial.unlink(missing_ok=True)
                (self._directory / "lock").unlink()
                self._directory.rmdir()

    def servers(self) -> list[RegistryEntry]:
        """Return the entries of all servers that may be alive; delete the entries of servers that are surely dead."""
        entries = []
        for path in sorted(self._directory.glob("*.json")):
            with suppress(OSError):  # the file has just been deleted, or permissions deny access
                with path.open("rb") as file:
                    data = file.read(_MAX_ENTRY_BYTES)
                entry = _parse(path.stem, data, time.time() - path.stat().st_mtime)
                if entry is None:  # if the server has just come back, it writes its entry again when it renews it
                    path.unlink(missing_ok=True)
                else:
                    entries.append(entry)
        return entries

    def read(self) -> list[str]:
        """Return multiaddrs that may lead to a server from here, those of living servers first."""
        return addresses_of(self.servers())

    def some_live(self, known: Iterable[RegistryEntry]) -> bool:
        """Return whether one of these servers is alive, and has not left the swarm since its entry was read."""
        peer_ids = {entry.peer_id for entry in known}
        return any(entry.is_alive for entry in self.servers() if entry.peer_id in peer_ids)

    def write(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Register this process as a server of the swarm."""
        self._directory.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        fields = {
            "addresses": list(addresses),
            "pid": pid,
            "started": _start(pid),
            "host": host_id(),
            "network": network_id(),
        }
        with written_atomically(self._directory / f"{peer_id}.json") as partial:
            partial.write_text(json.dumps(fields))

    def renew(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Renew the entry of a living server; write it again if it was deleted while the server was frozen."""
        try:
            os.utime(self._directory / f"{peer_id}.json")
        except FileNotFoundError:
            self.write(peer_id, addresses)

    def remove(self, peer_id: str) -> None:
        (self._directory / f"{peer_id}.json").unlink(missing_ok=True)


def addresses_of(entries: Iterable[RegistryEntry]) -> list[str]:
    """Return multiaddrs that may lead to these servers from here, those of living servers first."""
    return [address for entry in sorted(entries, key=lambda entry: not entry.is_alive) for address in entry.addresses]


def is_loopback(address: str) -> bool:
    """Return whether only processes of one machine, or of one network namespace, can use the multiaddr."""
    return _LOOPBACK.match(address) is not None


def host_id() -> str:
    """Return the scope in which pids are unique: one boot of one kernel, and one pid namespace."""
    return f"{boot_id()}/{_namespace('pid')}"


def network_id() -> str:
    """Return the scope in which loopback addresses are valid: one boot of one kernel, and one network namespace."""
    return f"{boot_id()}/{_namespace('net')}"


def _parse(peer_id: str, data: bytes, age_s: float) -> RegistryEntry | None:
    """Parse an entry; return None if it is damaged or stale, or its process is gone."""
    try:
        fields = parse_object(data, peer_id)
        addresses = tuple(map(str, fields["addresses"]))
        is_here = str(fields["host"]) == host_id()
        is_alive = _is_alive(int(fields["pid"]), fields["started"]) if is_here else age_s < FRESH_S
        is_near = str(fields["network"]) == network_id()
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if not is_alive and (is_here or age_s > STALE_S):
        return None
    return RegistryEntry(
        peer_id, tuple(address for address in addresses if is_near or not is_loopback(address)), is_alive
    )


def _is_alive(pid: int, started: object) -> bool:
    """Return whether the process with this pid and start time lives; the pid may belong to a new process by now."""
    if pid < 1:  # not the id of one process
        return False
    if os.name == "posix":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it lives, and belongs to another user
            pass
    now_started = _start(pid)
    return now_started is None or now_started == started


def _start(pid: int) -> float | None:
    """Return the process's start; -1 if it has ended, None if that is unknown.

    The start is in clock ticks since boot, because seconds since the epoch change with the clock on Linux. Elsewhere it
    is in seconds since the epoch.
    """
    try:
        fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return -1 if fields[0] in "ZX" else int(fields[19])  # proc(5): state is field 3, starttime field 22
    except OSError:
        return None if _PROCESSES.exists() else _start_s(pid)  # /proc may hide other users' processes


def _start_s(pid: int) -> float | None:
    import psutil

    try:
        process = psutil.Process(pid)
        started: float = -1 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return -1
    except psutil.Error:
        return None
    return started


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def registered_swarms() -> list[str]:
    """Return the names of the swarms that have servers on this machine."""
    return [registry.swarm for registry in _all_entries() if registry.read()]


def remove_ended_swarms() -> None:
    """Remove the directories of swarms whose servers have ended, such as demos."""
    for registry in _all_entries():
        registry.remove_if_ended()


def _all_entries() -> list[LocalRegistry]:
    directory = platformdirs.user_cache_path("swarm") / "swarms"
    with suppress(OSError):
        names = sorted(path.name for path in directory.iterdir() if path.is_dir())
        return [LocalRegistry(name, directory) for name in names if _NAME.fullmatch(name)]
    return []
