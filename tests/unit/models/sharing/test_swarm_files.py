"""What of a checkpoint's files is fetched from members, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.sharing import hashing, manifest, piece_store
from swarm_models.sharing.hashing import FileHashes
from swarm_models.sharing.manifest import Manifest, SharedFile, has_weights, may_be_shared
from swarm_models.sharing.piece_store import PieceStore
from swarm_models.sharing.swarm_files import SwarmFiles
from tests.published import bitsandbytes_4bit, bitsandbytes_config, publish
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
                data = (self._directory / file.name).read_bytes()[index * manifest.PIECE_BYTES :]
                self._store.write(file, index, data[: manifest.PIECE_BYTES])
                came.add(file.name)
        if any(map(has_weights, came)):
            self.calls.append(came)


def empty_store(source: Path, directory: Path) -> tuple[PieceStore, Any]:
    """A store without pieces of the files in ``source``, and a download of these."""
    hashes = FileHashes(directory / "kept")
    names = sorted(path.name for path in source.iterdir() if may_be_shared(path.name))
    store = PieceStore(
        Manifest("owner/model", "0" * 40, tuple(hashes.of(source / name, name) for name in names)), directory / "root"
    )
    return store, InstantDownload(store, source)


def test_once_the_files_are_open_no_thread_waits_for_the_loop_while_the_checkpoint_is_opened(tmp_path: Path) -> None:
    """Ctrl-C ends the fetching, and several openings cannot take all threads from one another."""

    def never(fetching: Coroutine[Any, Any, None]) -> None:
        fetching.close()
        raise AssertionError("a thread would wait")

    store, download = empty_store(Path(locate(DEFAULT_MODEL)), tmp_path)
    files = SwarmFiles(store, download, never)
    asyncio.run(files.open())
    assert ModelCheckpoint(files).weight_files == ("model.safetensors",)


def test_the_headers_of_all_wanted_shards_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    save_checkpoint("llama", source)
    original = ModelCheckpoint.open(source)
    store, download = empty_store(source, tmp_path)
    files = SwarmFiles(store, download, asyncio.run)
    asyncio.run(files.open())
    checkpoint = ModelCheckpoint(files)
    wanted = checkpoint.client_tensors()
    of_client = {Path(tensor.path).name for tensor in original.client_tensors().values()}
    assert 1 < len(of_client) < len(original.weight_files)
    assert download.calls == [of_client]
    for name, tensor in original.client_tensors().items():
        assert wanted[name].read().equal(tensor.read())
    checkpoint.stored(lambda _name: True)
    assert download.calls == [of_client, set(original.weight_files) - of_client]


def test_packed_weights_that_lie_behind_the_first_piece_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (manifest, hashing, piece_store):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    source = tmp_path / "source"
    publish(source, bitsandbytes_config(4), lambda weight: bitsandbytes_4bit(weight, "nf4", True), num_hidden_layers=1)
    expected = ModelCheckpoint.open(source).read(lambda _name: True)
    store, download = empty_store(source, tmp_path)
    files = SwarmFiles(store, download, asyncio.run)
    asyncio.run(files.open())
    read = ModelCheckpoint(files).read(lambda _name: True)
    assert read.keys() == expected.keys()
    assert all(read[name].equal(tensor) for name, tensor in expected.items())
