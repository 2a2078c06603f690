"""The content of a checkpoint's files: the manifest that members offer, and the one that most of them agree on.

Only data are shared. A manifest accepts no name of a file that is executed when it is loaded (Python, pickles), or
that leads elsewhere (links, paths).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from swarm_models.checkpoints.checkpoint import GENERATION_CONFIG
from swarm_models.checkpoints.files import CONFIG, GGUF, WEIGHTS, is_plain
from swarm_models.checkpoints.formats.shards import INDEX
from swarm_protocol.codecs.bitmap import to_bits
from swarm_protocol.errors import BadReply, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import MAX_NAME_CHARS, MIB
from swarm_protocol.wire.parsing import parse
from swarm_protocol.wire.printable import printable

PIECE_BYTES = 16 * MIB
DIGEST_BYTES = 32
MAX_MANIFEST_BYTES = 4 * MIB  # enough for a checkpoint of 2 TiB
_MAX_FILES = 2048
_MAX_FIELDS = 2 + 5 * _MAX_FILES  # of a manifest: each file is a field with four of its own
_MAX_FILE_BYTES = 1 << 43
_MAX_SMALL_BYTES = 64 * MIB  # limit of a file without weights
SMALL_FILES = (
    *(CONFIG, GENERATION_CONFIG, INDEX),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md"),
)


def has_weights(name: str) -> bool:
    """Return whether the name is that of a file of weights."""
    return name.endswith((WEIGHTS, GGUF))


def may_be_shared(name: str) -> bool:
    """Return whether files of this name hold nothing but data, and lie in the checkpoint's own directory."""
    return name in SMALL_FILES or (has_weights(name) and is_plain(name) and "/" not in name and "\\" not in name)


@dataclass(frozen=True)
class SharedFile:
    """One file of a checkpoint.

    Attributes:
        pieces: the SHA-256 of each piece of ``PIECE_BYTES``; the last piece is shorter.
    """

    name: str
    size_bytes: int
    sha256: bytes
    pieces: tuple[bytes, ...]

    def piece_bytes(self, index: int) -> int:
        """Return the size of a piece."""
        return min(PIECE_BYTES, self.size_bytes - index * PIECE_BYTES)

    def pieces_of(self, start: int, end: int) -> range:
        """Return the indices of the pieces that contain some byte from ``start`` to ``end``."""
        return range(start // PIECE_BYTES, -(-min(end, self.size_bytes) // PIECE_BYTES)) if start < end else range(0)

    @cached_property
    def key(self) -> str:
        """Return a name for this content, including its division into pieces."""
        return sha256(self._message().SerializeToString(deterministic=True)).hexdigest()

    def _message(self) -> pb.SharedFile:
        return pb.SharedFile(
            name=self.name, size_bytes=self.size_bytes, sha256=self.sha256, piece_sha256s=b"".join(self.pieces)
        )

    @classmethod
    def from_proto(cls, message: pb.SharedFile) -> SharedFile:
        """Parse a file; raise ValueError if it may not be shared."""
        name, size = message.name, message.size_bytes
        if not may_be_shared(name):
            raise ValueError(f"{printable(name, 40)!r} is no file that is shared: expected safetensors, GGUF or text")
        if not 0 < size <= (_MAX_FILE_BYTES if has_weights(name) else _MAX_SMALL_BYTES):
            raise ValueError(f"{name} is said to have {size} bytes")
        joined = message.piece_sha256s
        if len(message.sha256) != DIGEST_BYTES or len(joined) != DIGEST_BYTES * -(-size // PIECE_BYTES):
            raise ValueError(f"the digests of {name} do not fit its size")
        pieces = tuple(joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES))
        return cls(name, size, message.sha256, pieces)


@dataclass(frozen=True)
class Manifest:
    """The files of one revision of a model, in ascending order of their names."""

    model: str
    revision: str
    files: tuple[SharedFile, ...]

    @cached_property
    def data(self) -> bytes:
        """Return the serialised manifest that is sent; see ``protos/swarm.proto``."""
        files = [file._message() for file in self.files]
        return pb.Manifest(model=self.model, revision=self.revision, files=files).SerializeToString(deterministic=True)

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 that is in the record of every server that offers these files."""
        return sha256(self.data).digest()

    def file(self, name: str) -> SharedFile | None:
        """Return the file of this name, or None."""
        return next((file for file in self.files if file.name == name), None)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Parse a manifest; raise ValueError if it is invalid, or names files that may not be shared."""
        try:
            message = parse(pb.Manifest, data, _MAX_FIELDS)
        except RequestRejected as error:
            raise ValueError(f"no manifest: {error}") from None
        if len(message.files) > _MAX_FILES:
            raise ValueError(f"a manifest has {len(message.files)} files: expected at most {_MAX_FILES}")
        for text in (message.model, message.revision):
            if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
                raise ValueError(f"{printable(text, 40)!r} is no name of a model or a revision")
        files = tuple(map(SharedFile.from_proto, message.files))
        names = [file.name for file in files]
        if names != sorted(set(names)):
            raise ValueError("the files of a manifest are not in ascending order of their names")
        return cls(message.model, message.revision, files)


@dataclass(frozen=True)
class HeldPieces:
    """The offer of one member: a manifest and, by file key, the indices of the pieces that it has."""

    manifest: Manifest
    held: Mapping[str, frozenset[int]]

    def to_proto(self) -> pb.Offer:
        held = [to_bits(self.held.get(file.key, ()), len(file.pieces)) for file in self.manifest.files]
        return pb.Offer(manifest=self.manifest.data, held=held)

    @classmethod
    def parse(cls, data: bytes, digest: bytes, known: Manifest | None = None) -> HeldPieces:
        """Parse an offer; raise BadReply unless its manifest has this digest. The manifest may be ``known`` already."""
        try:
            message = parse(pb.Offer, data)
            if sha256(message.manifest).digest() != digest:
                raise ValueError("it offers other files than its record says")
            manifest = known or Manifest.parse(message.manifest)
            if len(message.held) != len(manifest.files):
                raise ValueError("it does not say which pieces of each file it has")
        except (RequestRejected, ValueError) as error:
            raise BadReply(f"no offer of weights: {error}") from None
        bits = zip(manifest.files, message.held, strict=True)
        return cls(manifest, {file.key: _set_bits(held, len(file.pieces)) for file, held in bits})


def agreed(manifests: Sequence[Manifest]) -> Manifest:
    """Return the files that most of the manifests have; all manifests are of one model and revision.

    The config is chosen first; then each other file by itself, among the manifests with that config. A file without
    weights is left out if most manifests lack it. A file of weights is kept, since a member may have only some of them.
    With equal votes the lowest digest wins, so that all readers of the same manifests choose the same.
    """
    assert manifests, "somebody must offer something"
    config = _most([manifest.file(CONFIG) for manifest in manifests])
    voters = [{file.name: file for file in manifest.files} for manifest in manifests if manifest.file(CONFIG) == config]
    names = {name for files in voters for name in files}
    chosen = (_most([files.get(name) for files in voters if name in files or not has_weights(name)]) for name in names)
    files = sorted((file for file in chosen if file is not None), key=lambda file: file.name)
    return Manifest(manifests[0].model, manifests[0].revision, tuple(files))


def _most(files: Iterable[SharedFile | None]) -> SharedFile | None:
    """Return the most frequent of the files; None among them is the vote of a manifest without such a file."""
    counts = Counter(files)
    return min(counts, key=lambda file: (-counts[file], "" if file is None else file.key))


def _set_bits(bits: bytes, count: int) -> frozenset[int]:
    return frozenset(index for index in range(min(count, 8 * len(bits))) if bits[index // 8] >> index % 8 & 1)
