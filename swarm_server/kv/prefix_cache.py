"""Reuse of keys and values among sessions that start with the same content.

Content is known by a chain of SHA-256 digests over what was sent: hidden states, positions and mask, page by page. So
a session gets only what it could have computed itself from what it has sent, and nothing goes by a name that a client
chooses. Pages stay where they were computed; the cache only refers to them.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch

from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.kv.kv_rows import Parts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of hidden states: the same bytes are other numbers in each


class ContentHash:
    """Digests of one row's content, a digest for each full page; a value."""

    def __init__(self, seed: bytes) -> None:
        """``seed``: whatever else the result depends on, such as the blocks."""
        self._digest = hashlib.sha256(seed)
        self._num_tokens = 0

    def copy(self) -> ContentHash:
        other = object.__new__(ContentHash)
        other._digest, other._num_tokens = self._digest.copy(), self._num_tokens
        return other

    def added(self, content: torch.Tensor) -> tuple[ContentHash, list[bytes]]:
        """After further tokens, content: [tokens, bytes per token] uint8; the digests of pages that became full."""
        other, digests = self.copy(), []
        data, token_bytes = content.contiguous().numpy().data.cast("B"), content.shape[1]
        start = 0
        while start < len(content):
            end = min(start + PAGE_TOKENS - other._num_tokens % PAGE_TOKENS, len(content))
            other._digest.update(data[start * token_bytes : end * token_bytes])
            other._num_tokens += end - start
            if other._num_tokens % PAGE_TOKENS == 0:
                digests.append(other._digest.digest())
            start = end
        return other, digests


def token_content(hidden: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What identifies each token, [batch, tokens, bytes]. hidden: [batch, tokens, size], the others [batch, tokens]."""
    dtype = torch.full(hidden.shape[:2], _DTYPES.index(hidden.dtype), dtype=torch.uint8)
    return torch.cat(
        [
            dtype[..., None],
            hidden.contiguous().view(torch.uint8),
            position_ids.to(torch.int64).contiguous()[..., None].view(torch.uint8),
            mask.to(torch.uint8)[..., None],
        ],
        dim=-1,
    )


class PrefixCache:
    """For each page of content, where its positions are in every group of the layout.

    Least recently used goes first. Thread-safe: room is asked back from the network's thread too."""

    def __init__(self, *, between_owners: bool = True) -> None:
        """``between_owners``: otherwise content is another one for each owner of sessions."""
        self._between_owners = between_owners
        self._entries: OrderedDict[bytes, tuple[Parts, ...]] = OrderedDict()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def seed(self, owner: str, context: str, adapter_key: bytes) -> ContentHash:
        """Of an owner's session before its first position; ``context``: what the result depends on besides.

        Neither text has a line break in it."""
        return ContentHash(f"{'' if self._between_owners else owner}\n{context}\n".encode() + adapter_key)

    def longest(self, digests: Sequence[bytes]) -> list[tuple[Parts, ...]]:
        """Where the content with these successive digests is, as far as it is known from the first on."""
        found = []
        with self._lock:
            for digest in digests:
                entry = self._entries.get(digest)
                if entry is None:
                    break
                found.append(entry)
        self.touch(digests[: len(found)])
        return found

    def add(self, digest: bytes, parts: tuple[Parts, ...]) -> None:
        """Keeps a page of content; nobody may fill its positions with anything else any more."""
        with self._lock:
            if digest not in self._entries:
                for group in parts:
                    for part in group:
                        part.page.pinned[part.row] = max(part.page.pinned[part.row], part.end)
                self._entries[digest] = parts

    def touch(self, digests: Sequence[bytes]) -> None:
        """These successive pages are in use: the first of them goes last, since no other is of use without it."""
        with self._lock:
            for digest in reversed(digests):
                if digest in self._entries:
                    self._entries.move_to_end(digest)

    def reclaim(self) -> bool:
        """Forgets the page that was used least recently; False if none is left."""
        with self._lock:
            if not self._entries:
                return False
            _, entry = self._entries.popitem(last=False)
        del entry  # outside the lock: its memory may be given back now
        return True
