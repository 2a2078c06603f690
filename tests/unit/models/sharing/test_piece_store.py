"""Pieces on disk: verified before they count, there after any end, and files that lie as in the hub's cache."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_models.checkpoints.files import LocalFiles
from swarm_models.sharing.manifest import Manifest, SharedFile
from swarm_models.sharing.piece_store import PieceStore, model_directory, remembered
from swarm_protocol.errors import BadReply, CheckpointError
from tests.unit.models.sharing.files import PIECE, manifest_of, small_pieces, write_files


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    small_pieces(monkeypatch)
    return manifest_of(write_files(tmp_path / "source"))


def piece(tmp_path: Path, file: SharedFile, index: int) -> bytes:
    return (tmp_path / "source" / file.name).read_bytes()[index * PIECE : (index + 1) * PIECE]


def opened(manifest: Manifest, tmp_path: Path) -> PieceStore:
    store = PieceStore(manifest, tmp_path / "cache")
    store.open()
    return store


def test_pieces_come_in_any_order_and_stay(manifest: Manifest, tmp_path: Path) -> None:
    file = manifest.files[1]
    order = [10, 3, 0, 7, 1, 2, 9, 8, 4, 5, 6]
    for count, index in enumerate(order):
        store = opened(manifest, tmp_path)  # another process each time
        assert store.held(file) == set(order[:count])
        assert store.missing(file, [*order, *order]) == sorted(order[count:])
        assert not (store.snapshot / file.name).exists()  # a directory of whole files only
        store.write(file, index, piece(tmp_path, file, index))
        sparse = store.path(file).read_bytes()
        assert sparse[index * PIECE :][:PIECE] == piece(tmp_path, file, index) and len(sparse) == file.size_bytes
    assert store.is_whole(file) and store.path(file) == store.snapshot / file.name
    assert store.path(file).read_bytes() == (tmp_path / "source" / file.name).read_bytes()
    assert store.path(file).readlink() == Path("../../blobs") / file.sha256.hex()  # as in the hub's cache
    assert LocalFiles(store.snapshot).path(file.name) == store.path(file)
    assert opened(manifest, tmp_path).held(file) == set(order)


def test_whole_files_have_their_names_where_symbolic_links_are_forbidden(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError("A required privilege is not held by the client")  # as Windows says

    monkeypatch.setattr(Path, "symlink_to", forbidden)
    store, file = opened(manifest, tmp_path), manifest.files[1]
    for index in range(len(file.pieces)):
        store.write(file, index, piece(tmp_path, file, index))
    path = store.snapshot / file.name
    assert store.path(file) == path and path.read_bytes() == (tmp_path / "source" / file.name).read_bytes()
    assert path.samefile(store.snapshot / "../../blobs" / file.sha256.hex())  # no second copy
    path.write_bytes(b"")  # the blob, too, is cut off
    assert store.path(file) != path
    path.unlink()
    path.write_bytes(b"another file")
    assert store.path(file) != path


def test_another_piece_is_refused_and_does_not_count(manifest: Manifest, tmp_path: Path) -> None:
    store, file = opened(manifest, tmp_path), manifest.files[1]
    right = piece(tmp_path, file, 2)
    for wrong in (right[:-1] + b"?", right[:-1], right + b"?", b"", piece(tmp_path, file, 3)):
        with pytest.raises(BadReply, match=r"piece 2 of model-1\.safetensors has other bytes"):
            store.write(file, 2, wrong)
    assert not store.held(file)


def test_a_piece_whose_file_is_gone_does_not_count(manifest: Manifest, tmp_path: Path) -> None:
    store, file = opened(manifest, tmp_path), manifest.files[1]
    store.write(file, 0, piece(tmp_path, file, 0))
    store.path(file).write_bytes(b"cut off")
    assert not store.held(file)
    store.write(file, 1, piece(tmp_path, file, 1))
    assert store.held(file) == {1}
    store.path(file).unlink()
    store.write(file, 2, piece(tmp_path, file, 2))
    assert store.held(file) == {2}


def test_two_processes_write_one_file(manifest: Manifest, tmp_path: Path) -> None:
    first, second, file = opened(manifest, tmp_path), opened(manifest, tmp_path), manifest.files[2]
    first.write(file, 0, piece(tmp_path, file, 0))
    second.write(file, 1, piece(tmp_path, file, 1))
    second.write(file, 2, piece(tmp_path, file, 2))
    first.write(file, 2, piece(tmp_path, file, 2))
    assert first.is_whole(file) and second.is_whole(file)


def test_a_false_manifest_spoils_no_true_file(manifest: Manifest, tmp_path: Path) -> None:
    true, other = manifest.files[2], manifest_of(write_files(tmp_path / "other", seed=1)).files[2]
    false = replace(true, pieces=other.pieces)
    store = opened(replace(manifest, files=(false,)), tmp_path)
    data = (tmp_path / "other" / true.name).read_bytes()
    store.write(false, 0, data[:PIECE])
    store.write(false, 1, data[PIECE : 2 * PIECE])
    with pytest.raises(CheckpointError, match=r"manifest \w+ is false.*Choose another manifest with --weights"):
        store.write(false, 2, data[2 * PIECE :])
    assert not store.held(false) and not opened(manifest, tmp_path).held(true)


def test_the_manifest_of_a_download_is_remembered(manifest: Manifest, tmp_path: Path) -> None:
    def known(wanted: bytes | None = None) -> Manifest | None:
        return remembered(manifest.model, manifest.revision, wanted, tmp_path / "cache")

    assert known() is None
    other = replace(manifest, files=manifest.files[:1])
    for last in (other, manifest):
        store = opened(last, tmp_path)
        os.utime(tmp_path / f"cache/models--owner--model/{store.snapshot.name}.manifest", (last is manifest,) * 2)
    assert known() == known(manifest.digest) == manifest and known(other.digest) == other
    assert known(bytes(32)) is None and remembered("..", manifest.revision, root=tmp_path / "cache") is None


def test_manifests_of_one_revision_share_no_directory(manifest: Manifest, tmp_path: Path) -> None:
    """Of two versions of a file, each store reads its own; what one manifest has more is not in the other's."""
    false = manifest_of(write_files(tmp_path / "false", seed=1))
    false = replace(false, files=(*false.files, replace(false.files[0], name="vocab.txt")))
    stores = {"source": opened(manifest, tmp_path), "false": opened(false, tmp_path)}
    for name, store in stores.items():
        for file in store.manifest.files[:3]:
            data = (tmp_path / name / file.name).read_bytes()
            for index in range(len(file.pieces)):
                store.write(file, index, data[index * PIECE :][:PIECE])
    for name, store in stores.items():
        for file in store.manifest.files[:3]:
            assert store.path(file).read_bytes() == (tmp_path / name / file.name).read_bytes()
    stores["false"].open()  # it links what is whole
    assert (stores["false"].snapshot / "vocab.txt").exists() and not (stores["source"].snapshot / "vocab.txt").exists()


@pytest.mark.parametrize("name", ["..", "a/../b", "/a", "a//b", "a/b/c/d", "a b", ".hidden", "", "a\0"])
def test_a_model_is_kept_under_a_plain_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no name"):
        model_directory(name, tmp_path)
    assert model_directory("owner/a-1.5b", tmp_path) == tmp_path / "models--owner--a-1.5b"


def test_a_disk_without_room_is_said_before(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1000000000\.0 GB of weights do not fit on the disk"):
        opened(manifest, tmp_path).require_room(10**18)
