"""Manifests: what may be in them, and which one most members agree on."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from swarm_models.sharing.hashing import FileHashes
from swarm_models.sharing.manifest import HeldPieces, Manifest, SharedFile, agreed, may_be_shared
from swarm_protocol.errors import BadReply
from swarm_protocol.pb import swarm_pb2 as pb
from tests.unit.models.sharing.files import PIECE, manifest_of, small_pieces, write_files


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


def test_a_file_is_named_by_its_content(tmp_path: Path) -> None:
    path = write_files(tmp_path) / "model-1.safetensors"
    file, data = FileHashes(tmp_path).of(path, path.name), path.read_bytes()
    assert (file.name, file.size_bytes, file.sha256) == (path.name, len(data), sha256(data).digest())
    assert file.pieces == tuple(sha256(data[at : at + PIECE]).digest() for at in range(0, len(data), PIECE))
    assert file.piece_bytes(10) == 5 and list(file.pieces_of(PIECE - 1, 2 * PIECE + 1)) == [0, 1, 2]
    assert list(file.pieces_of(PIECE, 2 * PIECE)) == [1] and not file.pieces_of(7, 7)


def test_a_large_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_models.sharing.hashing._LEAST_KEPT_BYTES", 1)
    path = write_files(tmp_path) / "model-1.safetensors"
    first = FileHashes(tmp_path / "kept").of(path, path.name)
    with monkeypatch.context() as patch:
        patch.setattr(FileHashes, "_read_all", None)
        assert FileHashes(tmp_path / "kept").of(path, path.name) == first
    path.write_bytes(b"x" * first.size_bytes)
    assert FileHashes(tmp_path / "kept").of(path, path.name).sha256 == sha256(b"x" * first.size_bytes).digest()


def test_reading_can_be_stopped(tmp_path: Path) -> None:
    path = write_files(tmp_path) / "config.json"
    with pytest.raises(InterruptedError):
        FileHashes(tmp_path, lambda: True).of(path, path.name)


def test_members_with_the_same_files_send_the_same(tmp_path: Path) -> None:
    ours, theirs = (manifest_of(write_files(tmp_path / name)) for name in ("ours", "theirs"))
    assert ours.data == theirs.data and ours.digest == sha256(theirs.data).digest()
    assert Manifest.parse(ours.data) == ours
    assert manifest_of(write_files(tmp_path / "others", seed=1)).digest != ours.digest


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [
        ("config.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("model.Q4_K_M.gguf", True),
        ("chat_template.jinja", True),
        ("modeling_evil.py", False),
        ("pytorch_model.bin", False),
        ("training_args.json", False),
        ("../model.safetensors", False),
        ("sub/model.safetensors", False),
        ("..\\model.safetensors", False),
        ("a\n.safetensors", False),
        (".safetensors.py", False),
    ],
)
def test_only_data_in_the_directory_itself_are_shared(name: str, is_shared: bool) -> None:
    assert may_be_shared(name) == is_shared
    message = pb.Manifest(model="m", revision="r")
    message.files.add(name=name, size_bytes=1, sha256=bytes(32), piece_sha256s=bytes(32))
    if is_shared:
        assert Manifest.parse(message.SerializeToString()).files[0].name == name
    else:
        with pytest.raises(ValueError, match="is no file that is shared"):
            Manifest.parse(message.SerializeToString())


@pytest.mark.parametrize(
    "fields",
    [
        {"size_bytes": 0},
        {"size_bytes": 1 << 62},
        {"size_bytes": PIECE + 1},
        {"sha256": b"short"},
        {"piece_sha256s": bytes(31)},
    ],
)
def test_what_strangers_say_of_a_file_must_fit(fields: dict[str, object]) -> None:
    message = pb.Manifest(model="m", revision="r")
    message.files.add(**{"name": "a.gguf", "size_bytes": 1, "sha256": bytes(32), "piece_sha256s": bytes(32)} | fields)
    with pytest.raises(ValueError, match=r"a\.gguf"):
        Manifest.parse(message.SerializeToString())


def test_empty_files_of_strangers_take_no_memory() -> None:
    """Two bytes each on the wire, but eighty in memory."""
    many = b"\x1a\x00" * 100_000
    with pytest.raises(ValueError, match="very many fields"):
        Manifest.parse(pb.Manifest(model="m", revision="r").SerializeToString() + many)
    offer = pb.Offer(manifest=b"{}").SerializeToString() + b"\x12\x00" * 100_000
    with pytest.raises(BadReply, match="very many fields"):
        HeldPieces.parse(offer, sha256(b"{}").digest())


def test_a_manifest_may_have_thousands_of_files() -> None:
    files = tuple(SharedFile(f"{number:04}.gguf", 1, bytes(32), (bytes(32),)) for number in range(2048))
    manifest = Manifest("m", "r", files)
    assert len(manifest.data) > 2**17 and Manifest.parse(manifest.data) == manifest
    offer = HeldPieces(manifest, {file.key: frozenset((0,)) for file in files})
    assert HeldPieces.parse(offer.to_proto().SerializeToString(), manifest.digest) == offer


def test_names_come_once_and_in_order(tmp_path: Path) -> None:
    manifest = manifest_of(write_files(tmp_path))
    for files in (manifest.files[::-1], manifest.files * 2):
        with pytest.raises(ValueError, match="ascending order"):
            Manifest.parse(replace(manifest, files=files).data)


def test_an_offer_says_which_pieces_are_there(tmp_path: Path) -> None:
    manifest = manifest_of(write_files(tmp_path))
    offer = HeldPieces(manifest, {manifest.files[1].key: frozenset((0, 3, 10))})
    data = offer.to_proto().SerializeToString()
    read = HeldPieces.parse(data, manifest.digest)
    assert read.held[manifest.files[1].key] == {0, 3, 10} and not read.held[manifest.files[0].key]
    for wrong in (data[:-1], b"\xff", b""):
        with pytest.raises(BadReply, match="no offer of weights"):
            HeldPieces.parse(wrong, manifest.digest)
    with pytest.raises(BadReply, match="other files than its record says"):
        HeldPieces.parse(data, bytes(32))


def test_most_members_decide_file_by_file(tmp_path: Path) -> None:
    honest = manifest_of(write_files(tmp_path / "honest"))
    small, first, second = honest.files
    other = manifest_of(write_files(tmp_path / "other", seed=1))
    assert agreed([honest, other, honest]) == honest
    parts = [replace(honest, files=(small, first)), replace(honest, files=(small, second))]  # each has one shard
    assert agreed([*parts, other]) == honest
    false = replace(honest, files=(small, other.files[1], second))
    assert agreed([false, honest, parts[0]]) == honest
    assert agreed([honest, other]) == agreed([other, honest])  # all who read the same choose the same


def test_members_that_differ_in_a_licence_count_together(tmp_path: Path) -> None:
    common = manifest_of(write_files(tmp_path))
    text = replace(common.files[0], name="LICENSE")
    honest = [replace(common, files=(replace(text, sha256=bytes([number] * 32)), *common.files)) for number in range(4)]
    evil = replace(common, files=(replace(text, name="chat_template.jinja"), *common.files))
    chosen = agreed([*honest, evil, evil])
    assert chosen.file("chat_template.jinja") is None and chosen.files[-3:] == common.files
    assert agreed([honest[0], honest[1], honest[0], evil]) == honest[0]  # most have a licence, and most of those this


def test_a_config_of_the_most_decides_whose_other_files_count(tmp_path: Path) -> None:
    honest, other = (manifest_of(write_files(tmp_path / str(seed), seed)) for seed in range(2))
    mixed = replace(other, files=(honest.files[0], *other.files[1:]))
    assert agreed([honest, honest, mixed, other, other]) == honest
