"""The blocks that a server hosts. They are loaded one by one, and any consecutive part runs like one long block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionAndFullAttentionLayer
from transformers.masking_utils import create_masks_for_generate

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.family import Family, rope_depends_on_length, slice_config
from swarm_models.checkpoints.hollow_model import load_hollow_model
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import ACROSS_WINDOWS, run_numbers
from swarm_server.blocks.block_loading import load_block
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.machine.heap import freed_memory_returned

M = TypeVar("M", bound=nn.Module)

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

INDEX_ATTRIBUTES = ("layer_idx", "layer_id")  # where modules keep their block's index in the cache


class BlockStack:
    """Consecutive blocks of one model.

    ``stack.view(span)`` is the stack of some of these blocks and shares their weights. A session over a part of the
    stack runs on such a view, with a cache from that view. Modules inside the blocks must not be replaced once views
    exist; the ``transform`` of ``load_blocks`` replaces modules before that.

    Attributes:
        span: the blocks, numbered as in the whole model.
        config: the config of a model of these blocks alone.
        blocks: the modules, first block first; their cache indices start at 0.
        configs: every config that a module of the stack reads.
    """

    def __init__(self, hosted: _Hosted, span: Span) -> None:
        self._hosted = hosted
        self.span = span
        self.config = slice_config(hosted.hollow.config, span)
        self.blocks = nn.ModuleList(hosted.block(index, first=span.start) for index in span)
        self._model = _assemble(hosted.hollow, hosted.family, self.config, self.blocks)
        configs: list[Any] = [
            self.config,
            *(module.config for module in self._model.modules() if hasattr(module, "config")),
        ]
        self.configs: tuple[PreTrainedConfig, ...] = tuple({id(config): config for config in configs}.values())

    @property
    def family(self) -> Family:
        return self._hosted.family

    @property
    def num_blocks(self) -> int:
        return len(self.span)

    @property
    def hidden_size(self) -> int:
        return self.family.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the hidden states that go in and come out."""
        return self._hosted.dtype

    @property
    def device(self) -> torch.device:
        return self._hosted.device

    # The interface that stacks on several devices have as well, see ``SplitStack``.

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return (self.device,)

    @property
    def cuts(self) -> tuple[int, ...]:
        return ()

    def views(self, span: Span) -> list[BlockStack]:
        return [self.view(span)]

    def device_of(self, _index: int) -> torch.device:
        return self.device

    @property
    def row_independent(self) -> bool:
        """Return whether a row's result is independent of the other rows' lengths and of how a prompt is cut."""
        counts_padding = getattr(self.config, "log_scaling_n_floor", None) is not None  # Inkling counts it too
        return not (counts_padding or rope_depends_on_length(self.config))

    def view(self, span: Span) -> BlockStack:
        """Return the stack of the blocks of ``span``, which shares weights with this stack.

        Raises:
            ValueError: this stack does not hold all these blocks.
        """
        if not self.span.covers(span):
            raise ValueError(f"blocks {span} are not all among the hosted blocks {self.span}")
        return self._hosted.stack(span)

    def original(self, index: int) -> nn.Module:
        """Return the block from which all views are made. Hooks on it, or on modules in it, work in all views."""
        return self._hosted.originals[index]

    def modules(self) -> Iterator[nn.Module]:
        """Yield all modules in the blocks."""
        for index in self.span:
            yield from self.original(index).modules()

    def weight_addresses(self) -> set[int]:
        """Return the addresses of the memory of all parameters and buffers, also of those that all blocks share."""
        modules = (*self.modules(), *self._hosted.hollow.modules())
        tensors = (tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values()))
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for a session over these blocks; sliding and chunked blocks keep only their window."""
        cache = DynamicCache(config=self.config)
        if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
            cache.layers[0] = LinearAttentionAndFullAttentionLayer()  # it can report the session's length
        return cache

    def __call__(
        self,
        hidden: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        *,
        packed: bool = False,
        joined: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the blocks.

        Args:
            hidden: [batch, new, hidden_size], the input of the first block.
            attention_mask: [batch, past + new], 1 for tokens and 0 for padding; None if all are tokens.
            position_ids: [batch, new], or [batch, new, axes] in families that have axes; None if they continue from
                the cache's length.
            cache: from ``new_cache``, or any Cache of ``num_blocks`` layers; None for a forward without past, through
                which gradients flow to ``hidden``.
            packed: see ``BlockInput``; families that never keep packed sequences apart do not do so here either.
            joined: see ``BlockInput``; not with ``packed``.

        Returns:
            [batch, new, hidden_size], the output of the last block.
        """
        if attention_mask is None and cache is None and not packed:
            # Without any mask, transformers takes a jump in position_ids for the start of another sequence.
            attention_mask = hidden.new_ones(hidden.shape[:2], dtype=torch.long)
        if attention_mask is not None and not self.family.mask_covers_past:
            attention_mask = attention_mask[:, -hidden.shape[1] :]
        if position_ids is not None and position_ids.dim() == 3:
            position_ids = position_ids.permute(2, 0, 1)  # as transformers has them
        positions = {"position_ids": position_ids} if self.family.takes_positions else {}
        masks: Any = attention_mask
        if joined is not None:
            masks = masks_of(self.config, hidden, attention_mask, cache, joined)
        return self._model(
            inputs_embeds=hidden,
            attention_mask=masks,
            return_dict=True,
            **self.family.cache_arguments(cache, cache is not None),
            **positions,
        ).last_hidden_state


@dataclass
class _Hosted:
    """The modules and settings that all stacks over the same weights share."""

    family: Family
    hollow: PreTrainedModel  # its config is the whole model's
    originals: dict[int, nn.Module]
    dtype: torch.dtype
    device: torch.device
    stacks: dict[Span, BlockStack] = field(default_factory=dict)
    rebased: dict[tuple[int, int], nn.Module] = field(default_factory=dict)

    def stack(self, span: Span) -> BlockStack:
        if span not in self.stacks:
            self.stacks[span] = BlockStack(self, span)
        return self.stacks[span]

    def block(self, index: int, first: int) -> nn.Module:
        """Return block ``index`` for a stack that begins at block ``first``."""
        key = index, first
        if key not in self.rebased:
            self.rebased[key] = _rebase(self.originals[index], first)
        return self.rebased[key]


def _rebase(module: nn.Module, first: int) -> nn.Module:
    """Return the module with block indices counted from ``first``. Parts without an index are shared, not copied."""
    children = {name: _rebase(child, first) for name, child in module.named_children()}
    indices = {name: getattr(module, name) for name in INDEX_ATTRIBUTES if isinstance(getattr(module, name, None), int)}
    if not indices and all(children[name] is child for name, child in module.named_children()):
        return module
    copied = _shallow_copy(module, **{name: index - first for name, index in indices.items()})
    copied._modules.update(children)
    return copied


def _shallow_copy(module: M, **attributes: Any) -> M:
    """Return a new module object with the same parameters, buffers and children, and with these attributes in place of
    the module's own; hooks on one are hooks on both."""
    copied = copy.copy(module)
    vars(copied).update(attributes, _modules=dict(module._modules))
    return copied


def _assemble(
    hollow: PreTrainedModel, family: Family, config: PreTrainedConfig, blocks: nn.ModuleList
) -> PreTrainedModel:
    """Return the hollow model with these blocks in it. The given hollow model is unchanged."""
    base = _shallow_copy(hollow, config=config)
    owner: Any = base
    for name in filter(None, family.owner.split(".")):
        copied = _shallow_copy(getattr(owner, name), config=config)
        setattr(owner, name, copied)
        owner = copied
    setattr(owner, family.blocks, blocks)
    return base


# ---------------------------------------------------------------- positions that attend to later ones


def masks_of(
    config: PreTrainedConfig,
    hidden: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: Cache | None,
    joined: torch.Tensor,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return what a model of this config takes as its attention mask: one mask, or one for each kind of its layers.

    They are the masks that the model makes itself, in which all positions of a run attend to one another too.

    Args:
        hidden: [batch, new, hidden_size]; attention_mask: [batch, past + new] or None.
        joined: [batch, new], see ``BlockInput``.
    """
    past = 0 if cache is None else cache.get_seq_length()
    or_mask_function = _within_runs(joined.to(hidden.device), past)
    masks: torch.Tensor | dict[str, torch.Tensor] = create_masks_for_generate(
        config=config,
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        past_key_values=cache,
        position_ids=None,  # they would only separate packed sequences
        or_mask_function=or_mask_function,
    )
    return masks


def _within_runs(joined: torch.Tensor, past: int) -> MaskFunction:
    """Return a mask function that lets positions of a run see each other, and hides all others.

    ``past``: how many positions come before those of ``joined``; the function counts from the first of them.
    """
    numbers = pad(run_numbers(joined) + 1, (past, 0))  # earlier positions belong to no run of these
    crosses = pad(joined == ACROSS_WINDOWS, (past, 0))

    def see_each_other(row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        same = (numbers[row, query] == numbers[row, key]) & (numbers[row, query] > 0)
        return same & ((key > query) | crosses[row, key])

    return see_each_other


# ---------------------------------------------------------------- loading


def load_blocks(
    checkpoint: ModelCheckpoint,
    span: Span,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    transform: Callable[[nn.Module, int], None] | None = None,
    progress: Callable[[int], None] | None = None,
    layers: PackedLayers | None = None,
) -> BlockStack:
    """Load the blocks of ``span``, one after the other.

    Each block is read, moved to ``device``, changed in place by ``transform(block, index)`` (quantized, for example),
    and reported by ``progress(index)`` before the next block is read. Before the block, most of its linear layers go to
    ``transform`` one by one, each inside a module of its own. Layers that ``layers`` makes do not. Memory never holds
    more than the transformed blocks and one block in fp32. Usually it holds only one layer in fp32, or some of its rows
    with ``layers``. Experts that ``layers`` does not take and that are stored in fp32 take two thirds more while they
    are fused.

    Raises:
        ValueError: the model has no such blocks.
        UnsupportedModel: the model cannot be split.
        CheckpointError: a tensor is missing, damaged or of the wrong shape.
    """
    family = checkpoint.family
    span.within(family.num_blocks)
    device = torch.empty(0, device=device).device  # "cuda" is the current device: its tensors name its number
    # Tensors that are created in inference mode could not be used with autograd later.
    with torch.inference_mode(False), torch.no_grad(), freed_memory_returned():
        hollow, _ = load_hollow_model(family, checkpoint.config, dtype=dtype)
        hollow.to(device)  # type: ignore[arg-type]  # as transformers has wrapped it, mypy does not see self
        hosted = _Hosted(family, hollow.requires_grad_(False), {}, dtype, device)
        for index in span:
            if transform is None:
                block = load_block(checkpoint, index, dtype).to(device)
            else:
                block = load_block(checkpoint, index, dtype, _transformed(transform, index, device), layers).to(device)
                transform(block, index)
            hosted.originals[index] = block.eval().requires_grad_(False)
            if progress is not None:
                progress(index)
    return hosted.stack(span)


def _transformed(
    transform: Callable[[nn.Module, int], None], index: int, device: torch.device
) -> Callable[[nn.Linear], nn.Module]:
    def replace(linear: nn.Linear) -> nn.Module:
        holder = nn.Module()
        holder.add_module("linear", linear.to(device))
        transform(holder, index)
        return holder.get_submodule("linear")

    return replace
