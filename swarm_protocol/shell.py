"""The stock base model with some of its blocks and nothing else: what a server computes with."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

if TYPE_CHECKING:
    from swarm_protocol.families import Family


class ZeroPositions(nn.Module):
    """Stands for learned position embeddings on a server, which receives hidden states that already contain them."""

    def forward(self, positions: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


def shell_class(family: Family, hosted: Container[int]) -> type[PreTrainedModel]:
    """A subclass of the family's base model whose parts outside the blocks ``hosted`` have no parameters.

    ``from_pretrained(None, config=…, state_dict=…)`` of it loads the hosted blocks alone, under the names they have in
    a checkpoint. It takes the full config, since how a block is built may depend on its index.
    """

    class Shell(family.base_class):
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _hollow_out(self, family, hosted)

    # Both names: transformers skips its weight conversions for classes that look like a user's own.
    Shell.__name__, Shell.__module__ = family.base_class.__name__, family.base_class.__module__
    return Shell


def load_shell(
    family: Family,
    config: PreTrainedConfig,
    *,
    hosted: Container[int] = (),
    tensors: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Builds a shell on the CPU and loads ``tensors`` into it through the stock loader.

    Returns the shell and transformers' loading info (missing, unexpected and mismatched keys).
    """
    with no_progress_bars():
        return shell_class(family, hosted).from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors or {}),
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported, and refused with a sentence by the caller
            output_loading_info=True,
        )


@contextmanager
def no_progress_bars():
    """Keeps transformers from drawing a bar for every block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _hollow_out(base: nn.Module, family: Family, hosted: Container[int]) -> None:
    owner = family.owner_of(base)
    blocks = getattr(owner, family.blocks)
    for index in range(len(blocks)):
        if index not in hosted:
            blocks[index] = nn.Identity()
    for name in (family.embedding, *family.identities):
        setattr(owner, name, nn.Identity())
    for name in family.positions:
        setattr(owner, name, ZeroPositions())
    for name, value in family.neutral:
        setattr(owner, name, value)
