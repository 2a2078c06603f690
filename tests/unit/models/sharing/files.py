"""Files to share, small enough for tests: pieces have 64 bytes where ``small_pieces`` is used."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from swarm_models.sharing import hashing, manifest, piece_store
from swarm_models.sharing.hashing import FileHashes
from swarm_models.sharing.manifest import Manifest

PIECE = 64
SIZES = {"config.json": 30, "model-1.safetensors": 10 * PIECE + 5, "model-2.safetensors": 3 * PIECE}


def small_pieces(patch: pytest.MonkeyPatch) -> None:
    for module in (manifest, hashing, piece_store):
        patch.setattr(module, "PIECE_BYTES", PIECE)


def write_files(directory: Path, seed: int = 0) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        (directory / name).write_bytes(Random(f"{seed} {name}").randbytes(size))
    return directory


def manifest_of(directory: Path, names: list[str] | None = None) -> Manifest:
    hashes = FileHashes(directory / "kept")
    return Manifest(
        "owner/model", "0" * 16, tuple(hashes.of(directory / name, name) for name in sorted(names or SIZES))
    )
