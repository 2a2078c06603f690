"""The hook that gives remote blocks the context of each forward: its mask, positions and cache.

The hook sits on the module that holds the blocks, because the arguments that it passes to a block differ between
families.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import find_packed_sequence_indices

from swarm_client.model.cache import RemoteCache, session_of
from swarm_client.model.left_out import NoDropout, refuse_inner_outputs, require_padding_mask, wants
from swarm_client.model.masks import read_masks, require_alone
from swarm_client.model.model_pass import DeepStack
from swarm_client.model.remote_blocks import RemoteBlocks
from swarm_models.checkpoints.family import Family
from swarm_protocol.errors import RequestRejected

_AXES = 3  # time, height and width; see ``Family.position_axes``


def context_hook(owner: Any, blocks: RemoteBlocks, family: Family, no_dropout: NoDropout) -> Callable[..., Any]:
    """Return a hook that gives the blocks each forward's mask, positions and cache, and puts prompts before its input.

    Args:
        owner: the module that holds the blocks.
    """
    names = list(inspect.signature(owner.forward).parameters)

    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        refuse_inner_outputs(given, owner.config)
        # A model with pictures has made the masks already, as ``MaskFacts``.
        given["attention_mask"], joined = read_masks(given.get("attention_mask"))
        deep_stack = _deep_stack(given)
        require_padding_mask(given.get("attention_mask"))
        if blocks.training and torch.is_grad_enabled():
            no_dropout.warn(owner.config)
        cache = given.get(family.cache_argument)
        later = _opens_later(blocks, cache, given)  # before the next lines make a cache that nobody asked for
        use_cache = _uses_cache(owner, given)
        if cache is None and use_cache:
            cache = RemoteCache(blocks.remote, num_virtual=blocks.num_virtual)
        session = None if cache is None else session_of(cache, blocks.remote, blocks.num_virtual)
        past = 0 if session is None else session.length  # with virtual positions, which callers do not see
        positions_of_text, positions_of_blocks = _positions(given.get("position_ids"))
        # Without a mask, transformers applies this test to find out whether some row holds several sequences.
        packed = (
            cache is None
            and given.get("attention_mask") is None
            and positions_of_text is not None
            and find_packed_sequence_indices(positions_of_text) is not None
        )
        require_alone(joined, packed, blocks.prompts is not None)
        if blocks.prompts is not None:
            _require_no_prompts(packed, positions_of_blocks, deep_stack)
            # Some owners, such as BLOOM's, have no argument for positions.
            positions = {"position_ids": positions_of_blocks} if "position_ids" in names else {}
            given = blocks.prompts.before(given | positions, getattr(owner, family.embedding), past)
            positions_of_blocks = given.get("position_ids")
        blocks.begin(
            given.get("attention_mask"),
            positions_of_blocks,
            session,
            later=later,
            packed=packed,
            every_block=needs_every_block(owner, given),
            deep_stack=deep_stack,
            joined=joined,
        )
        return (), {**given, **family.cache_arguments(cache, use_cache)}

    return hook


def _opens_later(blocks: RemoteBlocks, cache: Any, given: dict[str, Any]) -> bool:
    """Return whether a new cache takes no KV room on servers yet.

    That is so if nobody asked for a cache and the pass may be one of training. Such a cache is often never used.
    """
    asked = cache is not None or given.get("use_cache") is not None
    return not asked and (torch.is_grad_enabled() or blocks.remote.added.drops)


def _require_no_prompts(packed: bool, positions: torch.Tensor | None, deep_stack: DeepStack | None) -> None:
    """Raise RequestRejected for what trained prompts would shift: packed sequences, or positions on several axes."""
    if packed:
        raise RequestRejected(
            "position_ids begin again within a row: packed sequences cannot be trained with prompts, which "
            "stand before one sequence per row; send them in rows of their own, with an attention_mask"
        )
    if deep_stack is not None or (positions is not None and positions.dim() > 2):
        raise RequestRejected(
            "pictures of this model have positions on several axes, which trained prompts (tuning_mode) would shift: "
            "use one or the other"
        )


def needs_every_block(owner: Any, given: dict[str, Any]) -> bool:
    """Return whether blocks are computed one by one.

    With layerdrop, the stock code skips a block by not calling its module.
    """
    has_layerdrop = owner.training and bool(getattr(owner, "layerdrop", 0))
    return wants("output_hidden_states", given, owner.config) or has_layerdrop


def _uses_cache(owner: Any, given: dict[str, Any]) -> bool:
    """Return whether the stock model returns a cache for these arguments, and makes one if none is given."""
    if getattr(owner, "gradient_checkpointing", False) and owner.training:
        return False
    use_cache = given.get("use_cache")
    return bool(getattr(owner.config, "use_cache", False) if use_cache is None else use_cache)


def _deep_stack(given: dict[str, Any]) -> DeepStack | None:
    """Return the features that the model adds after its first blocks, in a list that ``given`` shares.

    Raises:
        RequestRejected: the model adds features in another way.
    """
    if given.get("deepstack_features"):  # of Granite 4 Vision, for blocks far apart
        raise RequestRejected(
            "this model adds parts of a picture before its blocks, which are on servers: give it text alone"
        )
    if not given.get("deepstack_visual_embeds"):
        return None
    # The pass empties this list if servers add the features, and then the stock code has nothing to add.
    given["deepstack_visual_embeds"] = features = list(given["deepstack_visual_embeds"])
    return DeepStack(features, given["visual_pos_masks"])


def _positions(position_ids: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the positions that separate packed sequences, [batch, tokens], and the positions that blocks get.

    Models of Qwen2-VL's kind pass [axes, batch, tokens], or [1 + axes, batch, tokens] with the places in the text
    first. Blocks get [batch, tokens] where all axes are equal, as in text, and otherwise [batch, tokens, axes].
    """
    if position_ids is None or position_ids.dim() == 2:
        return position_ids, position_ids
    has_text = len(position_ids) == 1 + _AXES
    axes = position_ids[1:] if has_text else position_ids
    are_equal = bool((axes == axes[:1]).all())
    return position_ids[0] if has_text else None, axes[0] if are_equal else axes.permute(1, 2, 0)
