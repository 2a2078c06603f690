"""Reuse of keys and values among sessions that start with the same content.

Content is identified by a chain of SHA-256 digests over what was sent: hidden states, positions and mask, page by page.
A session therefore gets only what it could have computed itself from what it has sent, and no client can choose a name
for content. Pages stay where they were computed; the cache only refers to them.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from swarm_protocol.failures import logged_errors
from swarm_protocol.wire.codec import as_numpy
from swarm_protocol.wire.constants import MAX_POSITIONS_WITH_AXES, PAGE_TOKENS
from swarm_server.kv.kv_rows import Parts
from swarm_server.kv.kv_transfer import pack_parts, size_of
from swarm_server.kv.offload import KvOffload

_logger = logging.getLogger(__name__)
_PATIENCE_S = 0.1  # with the disk, on the compute thread
_PLACE = struct.Struct("=qB")  # the number of a position, and that nothing hides it
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of hidden states: equal bytes are different numbers in each


class ContentHash:
    """The digests of one row's content, one for each full page. Adding tokens gives a new hash."""

    def __init__(self, seed: bytes, before: ContentHash | None = None) -> None:
        """Start a hash, or continue one. ``seed``: whatever else the result depends on, such as the blocks."""
        self._digest, self._num_tokens = hashlib.sha256(seed), 0
        if before is not None:
            self._digest, self._num_tokens = before._digest.copy(), before._num_tokens

    def added(self, content: npt.ArrayLike) -> tuple[ContentHash, list[bytes]]:
        """Return the hash after ``content``, [tokens, bytes per token] uint8, and the digests of newly full pages."""
        other = ContentHash(b"", self)
        return other, other._add(content)

    def _add(self, content: npt.ArrayLike) -> list[bytes]:
        tokens = np.ascontiguousarray(content)
        data, token_bytes = tokens.data.cast("B"), tokens.shape[1]
        digests, start = [], 0
        while start < len(tokens):
            end = min(start + PAGE_TOKENS - self._num_tokens % PAGE_TOKENS, len(tokens))
            self._digest.update(data[start * token_bytes : end * token_bytes])
            self._num_tokens += end - start
            if self._num_tokens % PAGE_TOKENS == 0:
                digests.append(self._digest.digest())
            start = end
        return digests


def token_content(hidden: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return identifying bytes, [batch, tokens, bytes].

    hidden: [batch, tokens, size]; position_ids: [batch, tokens] or [batch, tokens, axes]; mask: [batch, tokens].
    """
    data = np.ascontiguousarray(as_numpy(hidden)).view(np.uint8)
    content = np.empty((*data.shape[:2], data.shape[2] + 10), np.uint8)
    content[..., 0] = _DTYPES.index(hidden.dtype)
    content[..., 1:-9] = data
    content[..., -9:-1] = _numbers(position_ids.numpy())[..., None].view(np.uint8)
    content[..., -1] = mask.numpy()
    return torch.from_numpy(content)


def next_contents(hidden: torch.Tensor, starts: Sequence[int]) -> list[bytes]:
    """Return for each row what ``token_content`` says of one position of text, whose number is in ``starts``.

    hidden: [rows, 1, size]. Unlike numpy's copies of many elements, nothing here lets other threads take the
    interpreter.
    """
    kind, data = bytes([_DTYPES.index(hidden.dtype)]), as_numpy(hidden).tobytes()
    size = len(data) // len(starts)
    firsts = range(0, len(data), size)
    return [
        kind + data[first : first + size] + _PLACE.pack(start, 1) for first, start in zip(firsts, starts, strict=True)
    ]


def _numbers(position_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Return one int64 for each position, [batch, tokens]. Equal values on all axes give that value, as without axes.

    Models with axes have at most ``MAX_POSITIONS_WITH_AXES`` positions, so that no two positions give the same number.
    """
    ids = np.ascontiguousarray(position_ids, np.int64)
    if ids.ndim == 2:
        return ids
    first, *others = np.moveaxis(ids, -1, 0)
    bits = MAX_POSITIONS_WITH_AXES.bit_length()
    numbers: npt.NDArray[np.int64] = first + sum(
        (axis - first) << (bits * number) for number, axis in enumerate(others, 1)
    )
    return numbers


class PrefixCache:
    """A map from each page of content to the place of its positions in every group of the layout.

    The least recently used page is evicted first. Thread-safe, because the network's thread reclaims room too.
    """

    def __init__(self, *, between_owners: bool = True, offload: KvOffload | None = None) -> None:
        """Start empty.

        Args:
            between_owners: whether sessions of different owners share content.
            offload: where the evicted pages go, from which ``read_back`` reads them; None means that they are lost.
        """
        self._between_owners = between_owners
        self._offload = KvOffload() if offload is None else offload
        self._entries: OrderedDict[bytes, tuple[Parts, ...]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def seed(self, owner: str, context: str, adapter_key: bytes) -> ContentHash:
        """Return the hash of an owner's session before its first position.

        ``context``: what else the result depends on. Neither ``owner`` nor ``context`` has a line break.
        """
        return ContentHash(f"{'' if self._between_owners else owner}\n{context}\n".encode() + adapter_key)

    def longest(self, digests: Sequence[bytes]) -> list[tuple[Parts, ...]]:
        """Return where the content with these successive digests is, up to the first unknown digest."""
        found = []
        with self._lock:
            for digest in digests:
                entry = self._entries.get(digest)
                if entry is None:
                    break
                found.append(entry)
        self.touch(digests[: len(found)])
        return found

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Return how many of these successive digests are known: those in the cache, then those that were evicted.

        A page in the cache behind one that was evicted does not count.
        """
        with self._lock:
            num_here = sum(1 for _ in takewhile(self._entries.__contains__, digests))
        return num_here + sum(1 for _ in takewhile(self._offload.__contains__, digests[num_here:]))

    def read_back(self, digest: bytes) -> torch.Tensor | None:
        """Return the bytes of an evicted page; None if they are gone, or the disk is busy."""
        return self._offload.read(digest, _PATIENCE_S)

    def add(self, digest: bytes, parts: tuple[Parts, ...]) -> None:
        """Keep a page of content. No other content may fill its positions from now on."""
        with self._lock:
            if digest not in self._entries:
                for group in parts:
                    for part in group:
                        part.page.pinned[part.row] = max(part.page.pinned[part.row], part.end)
                self._entries[digest] = parts

    def touch(self, digests: Sequence[bytes]) -> None:
        """Mark these successive pages as used. The first is evicted last, since the others are useless without it."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._entries:
                    self._entries.move_to_end(digest)

    def reclaim(self) -> bool:
        """Forget the least recently used page; return False if none is left."""
        with self._lock:
            if not self._entries:
                return False
            digest, entry = self._entries.popitem(last=False)
        with logged_errors(_logger, "a page of a prompt cannot leave the cache", level=logging.WARNING):  # no memory
            self._offload.keep(digest, size_of(entry), partial(pack_parts, entry))
        del entry  # outside the lock, because this may free the page's memory
        return True
