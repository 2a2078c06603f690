"""What of a checkpoint's files is fetched from members, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_protocol.sharing.hashing import FileHashes
from swarm_protocol.sharing.manifest import Manifest, SharedFile, has_weights
from swarm_protocol.sharing.piece_store import PieceStore
from swarm_protocol.sharing.swarm_files import SwarmFiles
from tests.zoo import save_checkpoint


class InstantDownload:
    """Has every piece at once.

    Attributes:
        calls: the names of the files with weights of which something was missing, for each call.
    """

    def __init__(self, store: PieceStore, directory: Path) -> None:
        self._store, self._directory = store, directory
        self.calls: list[set[str]] = []

    async def fetch(self, wanted: Iterable[tuple[SharedFile, Iterable[int]]]) -> None:
        came = set()
        for file, indices in wanted:
            for index in self._store.missing(file, indices):
                assert len(file.pieces) == 1
                self._store.write(file, index, (self._directory / file.name).read_bytes())
                came.add(file.name)
        if any(map(has_weights, came)):
            self.calls.append(came)


def test_the_headers_of_all_wanted_shards_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    save_checkpoint("llama", source)
    original = Checkpoint.open(source)
    hashes = FileHashes(tmp_path / "kept")
    names = sorted(path.name for path in source.iterdir())
    manifest = Manifest("owner/model", "0" * 40, tuple(hashes.of(source / name, name) for name in names))
    store = PieceStore(manifest, tmp_path / "root")
    download: Any = InstantDownload(store, source)
    files = SwarmFiles(store, download, asyncio.run)
    files.open()
    checkpoint = Checkpoint(files)
    wanted = checkpoint.client_tensors()
    of_client = {Path(tensor.path).name for tensor in original.client_tensors().values()}
    assert 1 < len(of_client) < len(original.weight_files)
    assert download.calls == [of_client]
    for name, tensor in original.client_tensors().items():
        assert wanted[name].read().equal(tensor.read())
    checkpoint.stored(lambda _name: True)
    assert download.calls == [of_client, set(original.weight_files) - of_client]
