"""What attends to later positions is read off the stock model's own masks, and servers rebuild exactly these masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, GemmaConfig
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from swarm_client import RequestRejected
from swarm_client.model.masks import ATTENTION, read_masks
from swarm_server.blocks.blocks import masks_of

PAST, WINDOW = 3, 3
RUNS = torch.tensor([[-1, 0, 0, 0, 0, 0, -1, 1, 1, -1], [-1, -1, -1, 0, -1, -1, 1, 1, 1, 1]])
PREFIX = torch.tensor([[0] * 8 + [-1] * 2, [0] * 10])  # as PaliGemma has them
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
IN_WINDOWS = Gemma3TextConfig(
    num_hidden_layers=2, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
)
ACROSS = Gemma2Config(num_hidden_layers=2, sliding_window=WINDOW)
Make = Callable[..., Any]


def made(
    config: Any, implementation: str, make: Make, runs: torch.Tensor, padding: torch.Tensor | None, past: int
) -> Any:
    """The masks that ``make`` of transformers makes; with a past, of the positions behind it."""
    config._attn_implementation = implementation
    return make(
        config=config,
        inputs_embeds=torch.zeros(len(runs), runs.shape[1] - past, 4),
        attention_mask=padding,
        past_key_values=with_past(past) if past else None,
        position_ids=None,
        block_sequence_ids=runs,
    )


def with_past(length: int) -> DynamicCache:
    """A cache that keeps all positions in all blocks, as the caches of servers and clients do."""
    cache = DynamicCache()
    for block in range(2):
        cache.update(torch.zeros(2, 1, length, 4), torch.zeros(2, 1, length, 4), block)
    return cache


@pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("past", [0, PAST])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("config", "make", "runs"),
    [
        pytest.param(IN_WINDOWS, create_masks_for_vision_model, RUNS, id="gemma3"),
        pytest.param(ACROSS, create_masks_for_generate, RUNS, id="gemma2"),
        pytest.param(ACROSS, create_masks_for_generate, PREFIX, id="paligemma2"),
        pytest.param(GemmaConfig(), create_masks_for_generate, PREFIX, id="paligemma"),
    ],
)
def test_servers_rebuild_the_stock_masks(
    config: Any, make: Make, runs: torch.Tensor, implementation: str, past: int, padding: torch.Tensor | None
) -> None:
    if past:  # positions before are text, because no run begins in an earlier call
        runs = torch.cat([torch.full((2, past), -1), runs], 1)
        padding = None if padding is None else torch.cat([torch.ones(2, past, dtype=torch.long), padding], 1)
    expected = made(config, implementation, make, runs, padding, past)
    of_client = made(config, ATTENTION, make, runs, padding, past)
    read, joined = read_masks(of_client)
    assert joined is not None
    assert read is None if padding is None else torch.equal(read, padding.bool())
    config._attn_implementation = implementation
    hidden, cache = torch.zeros(*joined.shape, 4), with_past(past) if past else None
    found = masks_of(config, hidden, padding, cache, joined)
    kinds = [None] if isinstance(expected, torch.Tensor) else list(expected)
    for kind in kinds:
        theirs, ours = (masks if kind is None else masks[kind] for masks in (expected, found))
        attends = torch.ones(2, joined.shape[1], dtype=torch.bool) if padding is None else padding[:, past:].bool()
        for row in range(2):  # nobody reads what padding attends to
            assert torch.equal(ours[row, 0][attends[row]], theirs[row, 0][attends[row]])


def test_text_joins_nothing() -> None:
    masks = made(IN_WINDOWS, ATTENTION, create_masks_for_vision_model, torch.full((2, 10), -1), PADDED, 0)
    padding, joined = read_masks(masks)
    assert torch.equal(padding, PADDED.bool()) and joined is None


def test_runs_that_see_one_another_are_refused() -> None:
    """Positions with text between them have the same number here, as in no known model."""
    with pytest.raises(RequestRejected, match="in a way that servers do not compute"):
        made(ACROSS, ATTENTION, create_masks_for_generate, torch.tensor([[0, 0, -1, 0, 0]]), None, 0)


def test_attention_in_both_directions_within_a_window_is_refused() -> None:
    """As in EmbeddingGemma: later positions are hidden beyond a window, so they are no runs."""
    config = Gemma3TextConfig(sliding_window=WINDOW)
    config._attn_implementation = ATTENTION
    with pytest.raises(RequestRejected, match="in a way that servers do not compute"):
        create_masks_for_generate(
            config=config,
            inputs_embeds=torch.zeros(1, 8, 4),
            attention_mask=None,
            past_key_values=None,
            or_mask_function=lambda _row, _head, query, key: (query - key).abs() < WINDOW,
        )
