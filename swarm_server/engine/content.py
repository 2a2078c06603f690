"""Content of a session as the prefix cache identifies it: by a digest of each full page.

Decoding fills a page in many steps. The page is hashed all at once when it is full, because hashing every token
separately takes as long as the rest of preparing a step.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from swarm_protocol.wire.block_input import BlockInput, run_numbers
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.engine.batch import positions_and_mask
from swarm_server.engine.session_state import KvState, SessionStep
from swarm_server.kv.kv_rows import KvRow
from swarm_server.kv.prefix_cache import token_content

# Added to the first byte of a position, which identifies the dtype, so that no text has the same bytes:
_WITH_ADDITIONS = 3  # for each block to whose output something is added
_WITH_DIGEST = 128  # for the digest of a run


def followed(state: KvState, step: SessionStep) -> KvState:
    """Return ``state`` with the content of ``step`` appended; the mask of earlier positions must be unchanged."""
    state = replace(state, unhashed=(*state.unhashed, step), can_match=False)
    is_full = step.start % PAGE_TOKENS + step.inputs.hidden.shape[1] >= PAGE_TOKENS
    return hashed(state) if is_full else state


def followed_by_one(state: KvState, row: KvRow, content: bytes) -> KvState:
    """Return ``state`` with ``row`` in place of its only one, and the content of the row's last position.

    ``content`` is only used if ``state`` has hashes.
    """
    if state.hashes is None:
        return state.followed_by(row, ())
    state = state.followed_by(row, (*state.unhashed, content))
    return state if row.length % PAGE_TOKENS else hashed(state)


def hashed(state: KvState) -> KvState:
    """Return ``state`` with the content of all its steps in the hashes."""
    if not state.unhashed or state.hashes is None:
        return state
    hashes, digests = state.hashes, state.digests
    for _, alike in itertools.groupby(_all_contents(state.unhashed), lambda content: content.shape[2]):
        first, *others = alike
        content = np.concatenate([first, *others], 1) if others else first
        added = [row_hash.added(row) for row_hash, row in zip(hashes, content, strict=True)]
        hashes = tuple([row_hash for row_hash, _ in added])
        digests = tuple([(*old, *new) for old, (_, new) in zip(digests, added, strict=True)])
    return replace(state, hashes=hashes, digests=digests, unhashed=())


def _all_contents(unhashed: Sequence[SessionStep | bytes]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the content of all these steps, [batch, tokens, bytes]."""
    for size, alike in itertools.groupby(unhashed, lambda each: len(each) if isinstance(each, bytes) else 0):
        if size:
            data = b"".join([each for each in alike if isinstance(each, bytes)])
            yield np.frombuffer(data, np.uint8).reshape(1, -1, size)
        else:
            steps = _joined(each for each in alike if isinstance(each, SessionStep))
            yield from (content.numpy() for each in steps for content in _contents(each))


def _joined(steps: Iterable[SessionStep]) -> Iterator[SessionStep]:
    """Yield the same content in fewer steps: those of plain text that follow one another become one."""
    together: list[SessionStep] = []
    was_plain = False
    for step in steps:
        is_plain = step.inputs.is_plain
        if together and not (is_plain and was_plain and _follows(step, together[-1])):
            yield _as_one(together)
            together = []
        together.append(step)
        was_plain = is_plain
    if together:
        yield _as_one(together)


def _follows(step: SessionStep, before: SessionStep) -> bool:
    hidden, earlier = step.inputs.hidden, before.inputs.hidden
    return step.start == before.start + earlier.shape[1] and hidden.dtype == earlier.dtype


def _as_one(steps: Sequence[SessionStep]) -> SessionStep:
    if len(steps) == 1:
        return steps[0]
    return SessionStep(steps[0].start, BlockInput(torch.cat([step.inputs.hidden for step in steps], 1)))


def _contents(step: SessionStep) -> Iterator[torch.Tensor]:
    """Yield the step's content, cut where pictures begin and end: text is the same however it came.

    The content of a position includes its additions. If the position is in a run, its content also includes the digest
    of the whole run, because its keys and values depend on later positions of the run.
    """
    inputs = step.inputs
    content = token_content(inputs.hidden, *positions_and_mask(step))
    further: list[tuple[torch.Tensor, int]] = []  # [batch, tokens, size], and what it adds to the first byte
    if inputs.additions is not None:
        added = inputs.additions.to(inputs.hidden).flatten(2).contiguous()
        further.append((added, _WITH_ADDITIONS * inputs.additions.shape[2]))
    if inputs.joined is not None:
        whole = torch.cat([content, *(each.view(torch.uint8) for each, _ in further)], 2)
        further.append((_digests_of_runs(whole, inputs.joined), _WITH_DIGEST))
    if not further:
        yield content
        return
    have_some = torch.stack([each.bool().any(2).any(0) for each, _ in further])  # [kinds, tokens]
    kinds, sizes = have_some.unique_consecutive(return_counts=True, dim=1)
    end = 0
    for has, size in zip(kinds.T.tolist(), sizes.tolist(), strict=True):
        start, end = end, end + size
        used = [each for each, is_used in zip(further, has, strict=True) if is_used]
        parts = [each[:, start:end].view(torch.uint8) for each, _ in used]
        piece = torch.cat([content[:, start:end], *parts], 2)
        piece[..., 0] += sum(number for _, number in used)
        yield piece


def _digests_of_runs(content: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
    """Return for each position the digest of its run, [batch, tokens, bytes]; zeros where there is no run."""
    digests = content.new_zeros(*joined.shape, hashlib.sha256().digest_size)
    for row, numbers in enumerate(run_numbers(joined)):
        end = 0
        for size in numbers.bincount().tolist():
            start, end = end, end + size
            if size > 1:
                run = torch.cat([content[row, start:end], joined[row, start:end, None]], 1)
                digest = bytearray(hashlib.sha256(run.numpy().data).digest())
                digests[row, start:end] = torch.frombuffer(digest, dtype=torch.uint8)
    return digests


def same_mask(mask: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return mask is other or (mask is not None and other is not None and torch.equal(mask, other))


def hiding(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask, or None if it hides nothing."""
    return None if mask is None or bool(mask.all()) else mask
