"""Content of a session as the prefix cache identifies it: by a digest of each full page.

Decoding fills a page in many steps. The page is hashed all at once when it is full, because hashing every token
separately takes as long as the rest of preparing a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    contents = itertools.chain.from_iterable(map(_contents, state.unhashed))
    for _, alike in itertools.groupby(contents, lambda content: content.shape[2]):
        content = torch.cat(list(alike), 1)
        added = [row_hash.added(row) for row_hash, row in zip(state.hashes, content, strict=True)]
        state = replace(
            state,
            hashes=tuple(row_hash for row_hash, _ in added),
            digests=tuple((*old, *new) for old, (_, new) in zip(state.digests, added, strict=True)),
        )
        assert state.hashes is not None
    return replace(state, unhashed=())


def _contents(step: SessionStep) -> Iterator[torch.Tensor]:
    """Yield the step's content, cut where positions with additions begin and end: text is the same however it came."""
    hidden, context = step.inputs.stacked, positions_and_mask(step)
    if hidden.dim() == 3:
        yield token_content(hidden, *context)
        return
    have_some = hidden[:, :, 1:].flatten(2).any(2).any(0)
    end = 0
    for has_some, size in zip(*have_some.unique_consecutive(return_counts=True), strict=True):
        start, end = end, end + int(size)
        piece = hidden[:, start:end] if has_some else hidden[:, start:end, 0]
        yield token_content(piece, *(each[:, start:end] for each in context))


def same_mask(mask: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return mask is other or (mask is not None and other is not None and torch.equal(mask, other))


def hiding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask, or None if it hides nothing."""
    return None if mask is None or bool(mask.all()) else mask
