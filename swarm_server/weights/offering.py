"""The files that a server offers to members that lack them, and the rate at which it sends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.files import HubModel, LocalFiles
from swarm_models.sharing.download import LEAST_BYTES_PER_S
from swarm_models.sharing.hashing import FileHashes, lower_priority
from swarm_models.sharing.manifest import PIECE_BYTES, SMALL_FILES, HeldPieces, Manifest, SharedFile, may_be_shared
from swarm_models.sharing.swarm_files import SwarmFiles
from swarm_protocol.errors import CheckpointError, PeerBusy, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.streams.limits import BandwidthBudget, Places
from swarm_protocol.wire.codec import parts_of
from swarm_protocol.wire.constants import MIB

_MAX_SENT, _MAX_SENT_TO_ONE = 16, 4  # pieces sent at a time
_MIN_SENT_BYTES, _MAX_SENT_BYTES = MIB // 64, MIB // 4  # of a piece that are sent at a time
_SENT_S = 0.01  # of the rate that are sent at a time: on the line, a session's step waits for no more
_BURST_S = 0.1  # of the rate that may be sent at once after a silence
_READ_BYTES = MIB  # of a piece that are read at a time
_SHARE_OF_LINE = 0.5  # of the bandwidth, while sessions compute
_UNMEASURED_BYTES_PER_S = 4e6  # while sessions compute, if the bandwidth was not measured
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompetingTraffic:
    """The other use of the server's bandwidth.

    Attributes:
        has_sessions: whether some session has computed within the last second.
        line_bytes_per_s: the measured bandwidth; 0 if it was not measured.
    """

    has_sessions: bool = False
    line_bytes_per_s: float = 0.0


def rate_beside(load: CompetingTraffic) -> float:
    """Return how many bytes per second may be sent: no limit without sessions, else a share of the bandwidth."""
    if not load.has_sessions:
        return inf
    return _SHARE_OF_LINE * load.line_bytes_per_s or _UNMEASURED_BYTES_PER_S


@dataclass(frozen=True)
class _Offered:
    """The offered files of this machine, with their paths and their times of change."""

    manifest: Manifest
    paths: Mapping[str, tuple[Path, int]] = field(default_factory=dict)  # by name, with the time of change in ns


class Offering:
    """The files that members may get from this server. Used on one event loop only.

    Attributes:
        digest: the digest of the manifest; empty while nothing is offered.
    """

    def __init__(
        self,
        checkpoint: ModelCheckpoint,
        rate: float | None,
        load: Callable[[], CompetingTraffic] = CompetingTraffic,
        hashes: FileHashes | None = None,
        *,
        public_only: bool = False,
    ) -> None:
        """Create an offering; ``rate`` is in bytes per second: None means ``rate_beside``, 0 offers nothing.

        If ``public_only``, a model on the hub is offered only if the hub gives it to anybody.
        """
        self._checkpoint = checkpoint
        self._rate, self._load, self._public_only = rate, load, public_only
        self._stopped = False
        self._hashes = hashes or FileHashes(is_stopped=lambda: self._stopped)
        self._offered: _Offered | None = None
        self._pieces: dict[bytes, list[tuple[SharedFile, int]]] = {}  # files with the index of a piece, by its digest
        self._budget = BandwidthBudget(self._bytes_per_s, _BURST_S)
        self._places = Places("pieces of weights being sent", _MAX_SENT, _MAX_SENT_TO_ONE)
        self._offers = Places("offers of weights being sent", _MAX_SENT, _MAX_SENT_TO_ONE)

    @property
    def digest(self) -> bytes:
        return b"" if self._offered is None else self._offered.manifest.digest

    async def refresh(self) -> None:
        """Find the files to offer; they are read once, in the background, with the lowest priority."""
        if self._rate == 0:
            return
        with ThreadPoolExecutor(1, initializer=lower_priority) as thread:
            try:
                found = await asyncio.get_running_loop().run_in_executor(thread, self._find)
            except asyncio.CancelledError:
                self._stopped = True  # makes the thread end, which the context waits for
                raise
            except (OSError, CheckpointError) as error:
                _logger.warning("weights are not offered to others: %s", error)
                return
        if found is None or (self._offered is not None and found == self._offered):
            return
        self._offered = found
        self._pieces = {}
        for file in found.manifest.files:
            for index, digest in enumerate(file.pieces):
                self._pieces.setdefault(digest, []).append((file, index))
        size_bytes = sum(file.size_bytes for file in found.manifest.files)
        _logger.info(
            "offering %d files of %s to members that have none: %.3g GB, manifest %s",
            len(found.manifest.files),
            self._checkpoint.name,
            size_bytes / 1e9,
            found.manifest.digest.hex(),
        )

    def _find(self) -> _Offered | None:
        """Return the files to offer, or None if nothing can be offered."""
        files = self._checkpoint.files
        if isinstance(files, SwarmFiles):
            return _Offered(files.store.manifest)
        assert isinstance(files, LocalFiles | HubModel)
        if self._public_only and isinstance(files, HubModel) and not files.is_public:
            _logger.info(
                "%s is not offered to members that have none, since the hub does not say that anybody can have it: "
                "--share-weights always offers it",
                files.location,
            )
            return None
        paths = self._paths(files)
        if self._stopped:
            return None
        shared = [self._hashes.of(paths[name][0], name) for name in sorted(paths)]
        if not any(file.name in self._checkpoint.weight_files for file in shared):
            return None
        return _Offered(Manifest(self._checkpoint.name, self._checkpoint.revision, tuple(shared)), paths)

    def _paths(self, files: LocalFiles | HubModel) -> dict[str, tuple[Path, int]]:
        """Return the paths of the files to share, with their times of change; stop early if the offering stops."""
        paths = {}
        for name in (*SMALL_FILES, *self._checkpoint.weight_files):
            if self._stopped:  # each file may take a request to the hub
                break
            path = files.local(name) if may_be_shared(name) else None
            if path is not None and path.stat().st_size:
                paths[name] = path, path.stat().st_mtime_ns
        return paths

    # ------------------------------------------------------------ for members

    async def parts(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """Yield the serialised offer. Raise RequestRejected if there is none, PeerBusy if too many are being sent."""
        offered = self._require()
        with self._offers.taken(caller):
            held = {file.key: await self._held(offered, file) for file in offered.manifest.files}
            data = HeldPieces(offered.manifest, held).to_proto().SerializeToString()
            for part in parts_of(data):
                await self._budget.take(len(part))
                yield part

    async def piece(self, caller: Caller, digest: bytes) -> AsyncGenerator[bytes, None]:
        """Yield a piece, by its SHA-256. Raise RequestRejected if it is not offered, PeerBusy if too many are sent."""
        offered = self._require()
        # Each piece gets twice the minimum speed: members give up slower ones, and other traffic interferes.
        most = max(1, int(min(_MAX_SENT, self._bytes_per_s() / (2 * LEAST_BYTES_PER_S))))
        if self._places.num_taken >= most:
            raise PeerBusy(f"there are {most} pieces of weights being sent already")
        with self._places.taken(caller):
            for file, index in self._pieces.get(digest, ()):
                if index in await self._held(offered, file):
                    break
            else:
                raise RequestRejected("this server does not have the piece")
            end = index * PIECE_BYTES + file.piece_bytes(index)
            for start in range(index * PIECE_BYTES, end, _READ_BYTES):
                size_bytes = min(_READ_BYTES, end - start)
                rest = memoryview(await asyncio.to_thread(_read, self._path(offered, file), start, size_bytes))
                while rest:
                    sent_bytes = int(min(_MAX_SENT_BYTES, max(_MIN_SENT_BYTES, _SENT_S * self._bytes_per_s())))
                    part, rest = rest[:sent_bytes], rest[sent_bytes:]
                    await self._budget.take(len(part))
                    yield bytes(part)

    def _bytes_per_s(self) -> float:
        return rate_beside(self._load()) if self._rate is None else self._rate

    def _require(self) -> _Offered:
        if self._offered is None:
            raise RequestRejected("this server offers no weights")
        return self._offered

    async def _held(self, offered: _Offered, file: SharedFile) -> frozenset[int]:
        files = self._checkpoint.files
        if isinstance(files, SwarmFiles):
            return await asyncio.to_thread(files.store.held, file)
        path, changed_ns = offered.paths[file.name]
        try:
            is_same = path.stat().st_mtime_ns == changed_ns
        except OSError:
            is_same = False
        return frozenset(range(len(file.pieces))) if is_same else frozenset()

    def _path(self, offered: _Offered, file: SharedFile) -> Path:
        files = self._checkpoint.files
        return files.store.path(file) if isinstance(files, SwarmFiles) else offered.paths[file.name][0]


def _read(path: Path, offset: int, size_bytes: int) -> bytes:
    """Read the bytes. Raise RequestRejected if the file was removed or shortened, because a retry would not help."""
    try:
        with path.open("rb", buffering=0) as opened:
            opened.seek(offset)
            data = opened.read(size_bytes)
    except OSError as error:
        raise RequestRejected(f"the file cannot be read any more: {error.strerror}") from None
    if len(data) < size_bytes:
        raise RequestRejected("the file is shorter than it was")
    return data
