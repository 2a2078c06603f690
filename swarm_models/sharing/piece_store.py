"""A store for files that arrive in pieces, in any order, in the user's cache; downloads resume after any interruption.

The layout is like the hub's. ``models--OWNER--NAME/blobs/KEY.incomplete`` is a sparse file. ``KEY.pieces`` has one byte
for each verified piece, written after the piece itself. A complete file is linked to ``blobs/SHA256``, the target of
``snapshots/REVISION-DIGEST/NAME``. That directory has only complete files of the manifest with this digest.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path

import platformdirs

from swarm_models.sharing.manifest import PIECE_BYTES, Manifest, SharedFile
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import BadReply, CheckpointError
from swarm_protocol.file_lock import lock
from swarm_protocol.wire.constants import MIB

_VERIFIED = b"\x01"
_NAME = re.compile(r"(?!\.)[\w.-]{1,96}", re.ASCII)
_DIGITS = 32  # of a manifest's digest, in the name of its directory
_MAX_PARTS = 3  # of a name: owner, model and GGUF file
_FREE_BYTES = 256 * MIB  # kept free on the disk


class PieceStore:
    """The files of one manifest. Several processes may write the same files, since each piece is the same from all.

    Attributes:
        snapshot: the directory of this manifest's complete files.
    """

    def __init__(self, manifest: Manifest, root: Path | None = None) -> None:
        """Set the directories below ``root``; raise CheckpointError if model or revision cannot name a directory."""
        self.manifest = manifest
        directory = model_directory(manifest.model, root)
        self._blobs = directory / "blobs"
        self.snapshot = directory / "snapshots" / f"{_part(manifest.revision)}-{manifest.digest.hex()[:_DIGITS]}"

    def open(self) -> None:
        """Make the directories and save the manifest; raise CheckpointError if they cannot be written."""
        try:
            for each in (self._blobs, self.snapshot):
                each.mkdir(parents=True, exist_ok=True, mode=0o700)
            with written_atomically(_remembered(self.snapshot)) as partial:
                partial.write_bytes(self.manifest.data)
            for file in self.manifest.files:
                if self.is_whole(file):
                    self._link(file)
        except OSError as error:
            raise CheckpointError(f"{self.snapshot} cannot be written: {error.strerror}") from None

    def path(self, file: SharedFile) -> Path:
        """Return the path of the complete file, or else of its pieces."""
        whole, incomplete = self.paths(file)
        return whole if self._is_linked(file) and self.is_whole(file) else incomplete

    def paths(self, file: SharedFile) -> tuple[Path, Path]:
        """Return the path of the complete file, and the path of its pieces, which remains valid afterwards."""
        return self.snapshot / file.name, self._incomplete(file)

    def is_whole(self, file: SharedFile) -> bool:
        """Return whether the file is complete."""
        with suppress(OSError):
            return (self._blobs / file.sha256.hex()).stat().st_size == file.size_bytes
        return False

    def held(self, file: SharedFile) -> frozenset[int]:
        """Return the indices of the stored pieces."""
        if self.is_whole(file):
            return frozenset(range(len(file.pieces)))
        try:
            marks = self._marks(file).read_bytes()
            if self._incomplete(file).stat().st_size != file.size_bytes:  # then the marks are of a deleted file
                return frozenset()
        except OSError:
            return frozenset()
        return frozenset(index for index in range(len(file.pieces)) if marks[index : index + 1] == _VERIFIED)

    def missing(self, file: SharedFile, wanted: Iterable[int]) -> list[int]:
        """Return which of these pieces are not stored, each once, in ascending order."""
        return sorted(set(wanted) - self.held(file))

    def require_room(self, num_bytes: int) -> None:
        """Raise CheckpointError unless the directory exists and its disk has room for this many bytes."""
        try:
            free = shutil.disk_usage(self._blobs).free
        except OSError as error:
            raise CheckpointError(f"{self._blobs} cannot be read: {error.strerror}") from None
        if num_bytes and num_bytes + _FREE_BYTES > free:
            raise CheckpointError(
                f"{num_bytes / 1e9:.1f} GB of weights do not fit on the disk of {self._blobs}, which has "
                f"{free / 1e9:.1f} GB left: make room there, or choose another directory with XDG_CACHE_HOME"
            )

    def write(self, file: SharedFile, index: int, data: bytes | bytearray) -> None:
        """Store a piece.

        Raises:
            BadReply: the data do not match the digest. CheckpointError: the piece cannot be written.
        """
        if len(data) != file.piece_bytes(index) or sha256(data).digest() != file.pieces[index]:
            raise BadReply(f"piece {index} of {file.name} has other bytes than its digest says")
        try:
            with _opened(self._incomplete(file)) as descriptor:
                self._begin(file, descriptor)
                _write_at(descriptor, data, index * PIECE_BYTES)
                os.fsync(descriptor)  # before the mark, which must never be true of data that a power cut has lost
            with _opened(self._marks(file)) as descriptor:
                _write_at(descriptor, _VERIFIED, index)
            if len(self.held(file)) == len(file.pieces):
                self._finish(file)
        except OSError as error:
            raise CheckpointError(f"{file.name} cannot be written in {self._blobs}: {error.strerror}") from None

    def _begin(self, file: SharedFile, descriptor: int) -> None:
        if os.fstat(descriptor).st_size == file.size_bytes:
            return
        lock(descriptor)  # until it is closed: another process may begin at the same time
        if os.fstat(descriptor).st_size != file.size_bytes:
            with _opened(self._marks(file)) as marks:  # left from a deleted file
                os.ftruncate(marks, 0)
            os.ftruncate(descriptor, file.size_bytes)

    def _finish(self, file: SharedFile) -> None:
        incomplete = self._incomplete(file)
        with incomplete.open("rb", buffering=0) as opened:
            digest = file_digest(opened, sha256)
        if digest.digest() != file.sha256:  # each piece matches the manifest, but the whole file does not
            incomplete.unlink()
            self._marks(file).unlink()
            raise CheckpointError(
                f"the manifest {self.manifest.digest.hex()[:16]} is false: the pieces of {file.name} do not make up "
                "this file. Choose another manifest with --weights"
            )
        with suppress(FileExistsError):  # the other name stays, because readers have the file open by it
            os.link(incomplete, self._blobs / file.sha256.hex())
        self._link(file)

    def _link(self, file: SharedFile) -> None:
        """Link a complete file to its own name; where symbolic links are forbidden, as on Windows, by a hard link."""
        if not self._is_linked(file):
            with written_atomically(self.snapshot / file.name) as partial:
                try:
                    partial.symlink_to(_target(file))
                except OSError:
                    os.link(self._blobs / file.sha256.hex(), partial)

    def _is_linked(self, file: SharedFile) -> bool:
        path = self.snapshot / file.name
        if path.is_symlink():
            return path.readlink() == _target(file)
        with suppress(OSError):
            return path.samefile(self._blobs / file.sha256.hex())
        return False

    def _incomplete(self, file: SharedFile) -> Path:
        return self._blobs / f"{file.key}.incomplete"

    def _marks(self, file: SharedFile) -> Path:
        return self._blobs / f"{file.key}.pieces"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for writing at any offset; create it if it is missing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def model_directory(model: str, root: Path | None = None) -> Path:
    """Return the directory of a model's files; raise CheckpointError if the name cannot be a directory's."""
    root = root or platformdirs.user_cache_path("swarm") / "hub"
    parts = model.split("/")
    if len(parts) > _MAX_PARTS:
        raise CheckpointError(f"{model!r} is no name of a model that can be kept: expected OWNER/NAME")
    return root / "--".join(["models", *map(_part, parts)])


def remembered(model: str, revision: str, wanted: bytes | None = None, root: Path | None = None) -> Manifest | None:
    """Return the manifest of an earlier download of this revision, or None.

    ``wanted`` is its digest; None means the download that was begun or resumed last.
    """
    try:
        snapshots = model_directory(model, root) / "snapshots"
        digits = "?" * _DIGITS if wanted is None else wanted.hex()[:_DIGITS]
        paths = snapshots.parent.glob(_remembered(snapshots / f"{_part(revision)}-{digits}").name)
        newest = max(paths, key=lambda path: path.stat().st_mtime_ns)
        manifest = Manifest.parse(newest.read_bytes())
    except (OSError, ValueError):  # CheckpointError is a ValueError
        return None
    return manifest if wanted in (None, manifest.digest) else None


def _remembered(snapshot: Path) -> Path:
    return snapshot.parent.parent / f"{snapshot.name}.manifest"


def _target(file: SharedFile) -> Path:
    return Path("..", "..", "blobs", file.sha256.hex())


def _part(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{name!r} is no name that a directory can have: expected letters, digits, '.', '-', '_'")
    return name


def _write_at(descriptor: int, data: bytes | bytearray, offset: int) -> None:
    rest = memoryview(data)
    os.lseek(descriptor, offset, os.SEEK_SET)  # the descriptor is this call's own; Windows has no pwrite
    while rest:
        rest = rest[os.write(descriptor, rest) :]
