"""The digests of files and their pieces; for large files, a cache holds them until the file changes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import platformdirs

from swarm_models.sharing.manifest import PIECE_BYTES, SharedFile
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.wire.constants import MIB

_LEAST_KEPT_BYTES = 64 * MIB  # smaller files are hashed each time
_READ_BYTES = 1 * MIB
_LOWEST_PRIORITY = 19


class FileHashes:
    """The digests of this user's files."""

    def __init__(self, directory: Path | None = None, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Set the cache directory; if ``is_stopped`` returns True, reading a file ends with InterruptedError."""
        self._directory = directory or platformdirs.user_cache_path("swarm") / "digests"
        self._is_stopped = is_stopped

    def of(self, path: Path, name: str) -> SharedFile:
        """Return the digests, cached if the file is unchanged; raise OSError, also if the file changes meanwhile.

        ``name``: the file's name in the checkpoint; in the hub's cache, the path leads to a file of another name.
        """
        before = _identity(path)
        kept = self._directory / f"{sha256(before.encode()).hexdigest()[:40]}.json"
        known = _read(kept, name, before)
        if known is not None:
            return known
        file = self._read_all(path, name)
        if _identity(path) != before:
            raise OSError(f"{path} has changed while it was read")
        if file.size_bytes >= _LEAST_KEPT_BYTES:
            with suppress(OSError):
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                with written_atomically(kept) as partial:
                    pieces = [piece.hex() for piece in file.pieces]
                    content = {"of": before, "size_bytes": file.size_bytes, "sha256": file.sha256.hex()}
                    partial.write_text(json.dumps(content | {"pieces": pieces}))
        return file

    def _read_all(self, path: Path, name: str) -> SharedFile:
        whole, pieces, size_bytes = sha256(), [], 0
        with path.open("rb", buffering=0) as opened:
            while True:
                piece, left = sha256(), PIECE_BYTES
                while left and (data := opened.read(min(left, _READ_BYTES))):
                    if self._is_stopped():
                        raise InterruptedError(f"{path} was not read to its end")
                    whole.update(data)
                    piece.update(data)
                    left -= len(data)
                if left < PIECE_BYTES:  # no empty piece behind a file of whole pieces
                    pieces.append(piece.digest())
                    size_bytes += PIECE_BYTES - left
                if left:
                    return SharedFile(name, size_bytes, whole.digest(), tuple(pieces))


def lower_priority() -> None:
    """Give this thread a low priority permanently, where the system has priorities of threads."""
    if sys.platform != "linux":  # elsewhere the call is about a process, which may be another one of that number
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _identity(path: Path) -> str:
    status = os.stat(path)
    return json.dumps([str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino])


def _read(kept: Path, name: str, identity: str) -> SharedFile | None:
    try:
        content = json.loads(kept.read_bytes())
        if content["of"] != identity:
            return None
        pieces = tuple(map(bytes.fromhex, content["pieces"]))
        return SharedFile(name, content["size_bytes"], bytes.fromhex(content["sha256"]), pieces)
    except (OSError, ValueError, KeyError, TypeError):
        return None
