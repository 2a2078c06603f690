"""The attention masks of stock models. Servers build them from the padding and from which positions see later ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, prepare_padding_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.block_input import ACROSS_WINDOWS, IN_WINDOWS

ATTENTION = "swarm_remote"

Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of rows, queries and keys


class MaskFacts(torch.Tensor):
    """A dummy mask, [batch, 1, 1, 1], with the facts from which servers build the mask of one kind of block.

    Attributes:
        padding: the padding mask, [batch, positions]; None without padding.
        joined: see ``BlockInput``.
    """

    def __new__(cls, mask: torch.Tensor, *_facts: torch.Tensor | None) -> MaskFacts:
        return mask.as_subclass(cls)

    def __init__(self, _mask: torch.Tensor, padding: torch.Tensor | None, joined: torch.Tensor | None) -> None:
        self.padding, self.joined = padding, joined


def _mask_facts(
    *_args: Any,
    batch_size: int = 1,
    q_length: int = 1,
    q_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = None,
    **_kwargs: Any,
) -> MaskFacts:
    """Return the facts about the mask that transformers describes by these arguments."""
    joined = None
    # A single new position sees no later one, because there is none yet.
    if mask_function is not None and q_length > 1:
        padding = prepare_padding_mask(attention_mask, q_length, q_offset)

        def sees(rows: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            seen = torch.as_tensor(mask_function(rows, 0, queries, keys))
            return seen if padding is None else seen & (padding[rows, queries] != 0) & (padding[rows, keys] != 0)

        joined = _joined(sees, batch_size, q_offset, q_length, device)
    return MaskFacts(torch.ones(batch_size, 1, 1, 1, dtype=torch.bool, device=device), attention_mask, joined)


def _joined(sees: Sees, batch_size: int, start: int, num_tokens: int, device: Any) -> torch.Tensor | None:
    """Return ``BlockInput.joined`` of ``num_tokens`` positions from ``start`` on, [batch, tokens]; None if all zero.

    Raises:
        RequestRejected: some positions see later ones, but not as all positions of a run do.
    """
    # A run is a sequence of positions of which each sees the next.
    rows = torch.arange(batch_size, device=device)[:, None]
    queries = torch.arange(start, start + num_tokens - 1, device=device)[None]
    sees_next = sees(rows, queries, queries + 1).expand(batch_size, -1)
    if not bool(sees_next.any()):
        return None
    before, after = pad(sees_next, (1, 0)), pad(sees_next, (0, 1))  # [batch, tokens]: joined with the one before, after
    row, first = (after & ~before).nonzero().unbind(1)
    _, last = (before & ~after).nonzero().unbind(1)  # each run has a first and a last position, in the same order
    first, last = first + start, last + start
    follows = row[1:] == row[:-1]
    sees_other_run = sees(row[:-1][follows], first[:-1][follows], first[1:][follows])
    crosses_windows = bool(sees(row, last, first).all())  # a window shorter than the run hides its first position
    begun_before = start > 0 and bool(sees(rows, queries[:, :1] - 1, queries[:, :1]).any())
    if not bool(sees(row, first, last).all()) or bool(sees_other_run.any()) or (begun_before and crosses_windows):
        _refuse()
    return after.to(torch.uint8) * (ACROSS_WINDOWS if crosses_windows else IN_WINDOWS)


def read_masks(mask: Any) -> tuple[Any, torch.Tensor | None]:
    """Return the padding mask, and ``BlockInput.joined``, of the masks that a model with pictures has made.

    ``mask``: one mask, or a mask for each kind of block. A mask that transformers did not make is returned as it is.
    """
    facts: list[Any] = list(mask.values()) if isinstance(mask, dict) else [mask]
    if not facts or not isinstance(facts[0], MaskFacts):
        return mask, None
    joined: list[torch.Tensor] = [each.joined for each in facts if each.joined is not None]
    if not joined:
        return facts[0].padding, None
    least = torch.stack(joined).amin(0)
    if len(joined) < len(facts) or any(not torch.equal(each != 0, least != 0) for each in joined):
        _refuse()
    return facts[0].padding, least


def _refuse() -> NoReturn:
    raise RequestRejected(
        "this model's positions see later ones in a way that servers do not compute: they compute causal attention, "
        "and attention in both directions within a picture or a prefix that comes in one call"
    )


def require_alone(joined: torch.Tensor | None, packed: bool, has_prompts: bool) -> None:
    """Raise RequestRejected if positions attend to later ones, and rows are packed or have trained prompts."""
    if joined is not None and (packed or has_prompts):
        other = "packed sequences" if packed else "trained prompts (tuning_mode)"
        raise RequestRejected(
            f"pictures of this model are attended to in both directions, which {other} do not allow: use "
            "one or the other"
        )


def _no_attention(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("attention of remote blocks is computed on the servers")


ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask_facts)
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _no_attention)
