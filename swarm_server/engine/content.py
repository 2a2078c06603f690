"""Content of a session as the prefix cache identifies it: by a digest of each full page.

Decoding fills a page in many steps. The page is hashed all at once when it is full, because hashing every token
separately takes as long as the rest of preparing a step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.engine.batch import positions_and_mask
from swarm_server.engine.session_state import KvState, SessionStep
from swarm_server.kv.prefix_cache import token_content


def followed(state: KvState, step: SessionStep) -> KvState:
    """Return ``state`` with the content of ``step`` appended; the mask of earlier positions must be unchanged."""
    state = replace(state, unhashed=(*state.unhashed, step), can_match=False)
    is_full = step.start % PAGE_TOKENS + step.inputs.hidden.shape[1] >= PAGE_TOKENS
    return hashed(state) if is_full else state


def hashed(state: KvState) -> KvState:
    """Return ``state`` with the content of all its steps in the hashes."""
    if not state.unhashed or state.hashes is None:
        return state
    for _, alike in itertools.groupby(state.unhashed, lambda step: step.inputs.hidden.dtype):
        content = torch.cat([token_content(step.inputs.hidden, *positions_and_mask(step)) for step in alike], 1)
        added = [row_hash.added(row) for row_hash, row in zip(state.hashes, content, strict=True)]
        state = replace(
            state,
            hashes=tuple(row_hash for row_hash, _ in added),
            digests=tuple((*old, *new) for old, (_, new) in zip(state.digests, added, strict=True)),
        )
        assert state.hashes is not None
    return replace(state, unhashed=())


def same_mask(mask: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return mask is other or (mask is not None and other is not None and torch.equal(mask, other))


def hiding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask, or None if it hides nothing."""
    return None if mask is None or bool(mask.all()) else mask
