"""Notes in the user's cache directory, by which servers and clients of one machine find their swarm without flags."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

DEFAULT_SWARM = "default"


def checked_name(swarm: str) -> str:
    """Raises ValueError unless the swarm's name can name a directory anywhere."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", swarm):
        raise ValueError(
            f"swarm name {swarm!r} is not usable: expected 1 to 64 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return swarm


class Notes:
    """One file per running server of a named swarm. A note whose server is gone is deleted when it is noticed."""

    def __init__(self, swarm: str = DEFAULT_SWARM, directory: Path | None = None) -> None:
        directory = directory or platformdirs.user_cache_path("swarm") / "swarms"
        self._directory = directory / checked_name(swarm)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held while a server decides whether to join or to start the swarm, so that two never both start it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> list[str]:
        """Multiaddrs of servers whose process is alive, one per server."""
        addresses = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                note = json.loads(path.read_text())
                alive = _alive(int(note["pid"]))
                address = str(note["address"])
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                alive, address = False, ""
            if alive:
                addresses.append(address)
            else:
                path.unlink(missing_ok=True)
        return addresses

    def write(self, peer_id: str, address: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{peer_id}.json"
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        partial.rename(path)

    def remove(self, peer_id: str) -> None:
        (self._directory / f"{peer_id}.json").unlink(missing_ok=True)

    def discard(self, address: str) -> None:
        """Deletes the note of a server that did not answer."""
        self.remove(address.rpartition("/p2p/")[2])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
