"""A checkpoint's files from members of the swarm, for ``ModelCheckpoint``: data are fetched before they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from swarm_models.checkpoints.files import GGUF, FileMissing
from swarm_models.checkpoints.formats.shards import SINGLE
from swarm_models.checkpoints.safetensors_file import LENGTH_BYTES, MAX_HEADER_BYTES, FileTensor
from swarm_models.sharing.download import Download
from swarm_models.sharing.manifest import SharedFile, has_weights
from swarm_models.sharing.piece_store import PieceStore

Run = Callable[[Coroutine[Any, Any, None]], None]


class SwarmFiles:
    """The files of one manifest. Methods that are no coroutines must run in other threads than the event loop's.

    Attributes:
        name, commit: the model and its revision, as the members have them.
        location: the directory of the complete files; or the GGUF file.
        gguf: the name of the GGUF file that holds the model, if it is one.
    """

    def __init__(self, store: PieceStore, download: Download, run: Run) -> None:
        """Set the store and the download; ``run`` runs a coroutine on the event loop and waits for it."""
        self.store = store
        self._download, self._run = download, run
        manifest = store.manifest
        self.name, self.commit = manifest.model, manifest.revision
        self.gguf = manifest.model.rpartition("/")[2] if manifest.model.endswith(GGUF) else None
        self.location = str(store.snapshot if self.gguf is None else store.snapshot / self.gguf)

    async def open(self) -> None:
        """Fetch what ``ModelCheckpoint`` reads as soon as it is opened; raise CheckpointError if that fails.

        These are the files without weights, and a GGUF file or the beginning of the only safetensors file.
        """
        await asyncio.to_thread(self.store.open)
        files = self.store.manifest.files
        wanted = [
            (file, range(len(file.pieces))) for file in files if not has_weights(file.name) or file.name == self.gguf
        ]
        wanted += [(file, file.pieces_of(0, LENGTH_BYTES)) for file in files if file.name == SINGLE]
        await self._download.fetch(wanted)

    def path(self, name: str) -> Path:
        """Return the file's path, once the header of a safetensors file, or the whole of another file, is there.

        Raises:
            FileMissing: the members' checkpoint has no such file. CheckpointError: it cannot be fetched.
        """
        file = self.store.manifest.file(name)
        if file is None:
            raise FileMissing(f"{self.name} has no {name} in the swarm")
        if not has_weights(name) or name.endswith(GGUF):
            self._fetch([(file, range(len(file.pieces)))])
        else:
            self._fetch([(file, file.pieces_of(0, LENGTH_BYTES))])
            with self.store.path(file).open("rb") as opened:
                header_bytes = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            # A length above the limit is false, and is refused when the header is read.
            self._fetch([(file, file.pieces_of(0, LENGTH_BYTES + min(header_bytes, MAX_HEADER_BYTES)))])
        return self.store.path(file)

    def fetch_headers(self, names: Iterable[str]) -> None:
        """Fetch the first pieces of these files from several members at once; raise CheckpointError if that fails."""
        files = filter(None, map(self.store.manifest.file, names))
        self._fetch((file, file.pieces_of(0, LENGTH_BYTES)) for file in files)

    def fetch(self, tensors: Iterable[FileTensor]) -> None:
        """Fetch the pieces that contain these tensors; raise CheckpointError if that fails."""
        files = {path: file for file in self.store.manifest.files for path in self.store.paths(file)}
        wanted: dict[SharedFile, set[int]] = {}
        for tensor in tensors:
            file = files[tensor.path]
            wanted.setdefault(file, set()).update(file.pieces_of(tensor.offset, tensor.offset + tensor.size_bytes))
        self._fetch(wanted.items())

    def _fetch(self, wanted: Iterable[tuple[SharedFile, Iterable[int]]]) -> None:
        missing = [(file, indices) for file, each in wanted if (indices := self.store.missing(file, each))]
        if missing:
            self._run(self._download.fetch(missing))
