"""The server's promise of KV-cache room: a token budget, handed out in leases."""

from __future__ import annotations

import threading

from swarm_protocol.errors import PeerBusy


class CacheBudget:
    """Room for ``capacity_tokens`` positions in every hosted block, shared by all sessions.

    Room is promised before it is used: memory never runs out in the middle of a step.
    """

    def __init__(self, capacity_tokens: int, num_blocks: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._num_blocks = num_blocks
        self._free = capacity_tokens * num_blocks  # in positions × blocks
        self._lock = threading.Lock()

    @property
    def tokens_left(self) -> int:
        """Positions that a new session over all hosted blocks could still get."""
        return self._free // self._num_blocks

    def lease(self, num_blocks: int, num_tokens: int = 0) -> Lease:
        """A lease over ``num_blocks`` of the hosted blocks; raises PeerBusy if there is no room for ``num_tokens``."""
        lease = Lease(self, num_blocks)
        lease.resize(num_tokens)
        return lease

    def _take(self, amount: int, num_blocks: int) -> None:
        with self._lock:
            if amount > self._free:
                raise PeerBusy(
                    f"no room for {-(-amount // num_blocks)} more tokens in the KV cache: "
                    f"{self._free // num_blocks} of {self.capacity_tokens * self._num_blocks // num_blocks} are left"
                )
            self._free -= amount


class Lease:
    """One session's room. Grows on demand; given back as a whole."""

    def __init__(self, budget: CacheBudget, num_blocks: int) -> None:
        self._budget = budget
        self._num_blocks = num_blocks
        self.num_tokens = 0

    def resize(self, num_tokens: int) -> None:
        """Raises PeerBusy, changing nothing, if there is no room."""
        self._budget._take((num_tokens - self.num_tokens) * self._num_blocks, self._num_blocks)
        self.num_tokens = num_tokens

    def grow_to(self, num_tokens: int) -> None:
        """Makes sure of room for ``num_tokens`` in all (rows × positions)."""
        if num_tokens > self.num_tokens:
            self.resize(num_tokens)

    def release(self) -> None:
        self.resize(0)


def default_cache_tokens(token_bytes: int, free_bytes: int) -> int:
    """A fifth of the memory that is free now, but at least 1024 and at most 65536 tokens.

    ``token_bytes`` is what one position takes in all hosted blocks.
    """
    return max(1024, min(65536, free_bytes // 5 // max(1, token_bytes)))
