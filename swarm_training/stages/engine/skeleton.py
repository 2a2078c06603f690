"""The stock model of a family with one stage's parts in it, and without the parts of other stages.

The family's own code does all that happens around the blocks (masks, rotary embeddings, scaled logits). It runs with
the config of the whole model. Modules that return their input stand for the blocks of other stages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as weight_init

from swarm_models.checkpoints.describing import describe
from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.hollow_model import LeftOut, ZeroPositions, hosted_alone, load_hollow_model, named_like
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.span import Span

# The arguments: a module's name in the whole model, the module, and the family's own way to initialise it.
InitWeights = Callable[[str, nn.Module, Callable[[nn.Module], None]], None]


class PassThrough(nn.Module):
    """A stand-in for a block of another stage, which returns its input."""

    def __init__(self, block: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple
        # A family's own code may read a block's type, which is a string.
        vars(self).update({name: value for name, value in vars(block).items() if isinstance(value, str)})

    def forward(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Tensor | tuple[Tensor, None]:
        return (hidden, None) if self._returns_tuple else hidden


class OneOfTwo(nn.Module):
    """A module that a family calls before its blocks and again after them; here, it acts at one of the two calls.
    ``calls``: the number of calls in the current forward pass."""

    def __init__(self, module: nn.Module, acts_at: int) -> None:
        super().__init__()
        self.module = module
        self._acts_at = acts_at
        self.calls = 0

    def begin(self, *_: object) -> None:
        """Begin a forward pass; a hook of the module's owner."""
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.module(hidden) if self.calls == self._acts_at else hidden


@dataclass(frozen=True)
class Layout:
    """The parts of a model that a stage has."""

    model_class: type[PreTrainedModel]
    family: Family
    span: Span
    before: tuple[str, ...]  # attributes of the blocks' owner that act on embeddings, such as bloom's norm
    # Those that act on the last block's output, such as the final norm. One attribute of nanochat does both.
    after: tuple[str, ...]
    tied: bool  # whether the head multiplies by the token embeddings

    @property
    def is_first(self) -> bool:
        return self.span.start == 0

    @property
    def is_last(self) -> bool:
        return self.span.end == self.family.num_blocks

    @property
    def has_embeddings(self) -> bool:
        return self.is_first or (self.is_last and self.tied)


def layout_of(config: PreTrainedConfig, span: Span) -> Layout:
    """Return a span's layout. Raises UnsupportedModel if models of this config cannot be trained in stages."""
    family = describe(config)
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModel(
            f"models of type {config.model_type!r} have no head for causal language models"
        ) from None
    before, after = _around_blocks(family, config)
    return Layout(
        model_class,
        family,
        span.within(family.num_blocks),
        before,
        after,
        ties_embeddings(config),
    )


def ties_embeddings(config: PreTrainedConfig) -> bool:
    """Return whether the head of models of this config multiplies by the token embeddings."""
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return bool(getattr(config, "tie_word_embeddings", False) and getattr(model_class, "_tied_weights_keys", None))


def _around_blocks(family: Family, config: PreTrainedConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ``family.identities`` that the stock code calls before its blocks, and those that it calls later or
    never."""
    hollow, _ = load_hollow_model(family, config)
    owner = family.owner_of(hollow)
    with weight_init.no_init_weights(), torch.device("meta"):
        whole = family.owner_of(family.base_class(copy.deepcopy(config)))
    # The stock forward pass runs with stand-ins in place of blocks, which takes no weights and little time.
    stand_ins = [PassThrough(block, family.returns_tuple) for block in getattr(whole, family.blocks)]
    setattr(owner, family.blocks, nn.ModuleList(stand_ins))
    called: list[str] = []
    for name, module in ((family.blocks, stand_ins[0]), *((name, getattr(owner, name)) for name in family.identities)):
        module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.append(name))
    with torch.no_grad():
        hollow(inputs_embeds=torch.zeros(1, 1, family.hidden_size), use_cache=False)
    begin = called.index(family.blocks)
    before = set(called[:begin])
    after = {name for name in family.identities if name not in before or name in called[begin:]}
    for name in before & after:  # two stages would train these parameters, each with its part of the gradient
        if any(True for _ in getattr(whole, name).parameters()):
            raise UnsupportedModel(
                f"models of type {config.model_type!r} cannot be trained in stages: {name} acts before the blocks and "
                "after them, and has parameters"
            )
    return tuple(sorted(before)), tuple(sorted(after))


def config_of(config: PreTrainedConfig, layout: Layout) -> PreTrainedConfig:
    """Return the whole model's config, as the model of one stage needs it."""
    config = copy.deepcopy(config)
    changes = {"tie_word_embeddings": layout.tied and layout.is_last}
    # The routers' part of the loss would need what the routers of all stages return.
    if getattr(config, "output_router_logits", False):
        changes["output_router_logits"] = False
    config.update(changes)
    return config


def stage_class(layout: Layout, init_weights: InitWeights) -> type[PreTrainedModel]:
    """Return a subclass of the stock class that has the stage's parts alone, under their names in the whole model.

    ``init_weights`` is called for each module that has no weights yet.
    """

    class StageModel(layout.model_class):  # type: ignore[name-defined,misc]
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            with weight_init.no_init_weights():  # all is still on the meta device, and most of it is removed below
                super().__init__(config, *args, **kwargs)
            base = base_of(self, layout.family)
            _leave_out_others(self, base, layout)
            names = {id(module): name for name, module in self.named_modules()}
            for module in self.modules():
                if isinstance(module, PreTrainedModel):  # each initialises its modules that are in no inner one
                    stock = module._init_weights
                    vars(module)["_init_weights"] = _beside_others(base, layout, names, init_weights, stock)

    return named_like(layout.model_class, StageModel)


def base_of(model: nn.Module, family: Family) -> Any:
    """Return the base model inside a model with a head."""
    return next(module for module in model.modules() if isinstance(module, family.base_class))


def _beside_others(
    base: nn.Module,
    layout: Layout,
    names: Mapping[int, str],
    init_weights: InitWeights,
    stock: Callable[[nn.Module], None],
) -> Callable[[nn.Module], None]:
    def initialize(module: nn.Module) -> None:
        if not isinstance(module, PassThrough):
            with hosted_alone(base, layout.family, set(layout.span)):
                init_weights(names[id(module)], module, stock)

    return initialize


def _leave_out_others(model: nn.Module, base: nn.Module, layout: Layout) -> None:
    family = layout.family
    owner = family.owner_of(base)
    blocks = getattr(owner, family.blocks)
    for index in range(family.num_blocks):
        if index not in layout.span:
            blocks[index] = PassThrough(blocks[index], family.returns_tuple)
    if not layout.has_embeddings:
        setattr(owner, family.embedding, LeftOut())
    if not layout.is_first:  # the first stage has added positions, and scaled the embeddings
        for name in family.positions:
            setattr(owner, name, ZeroPositions())
        for name, value in family.neutral:
            setattr(owner, name, value)
    for name in {*layout.before, *layout.after}:
        setattr(owner, name, _acting(owner, name, layout))
    if not layout.is_last:
        for name, child in list(model.named_children()):
            if child is not base:
                setattr(model, name, LeftOut())


def _acting(owner: nn.Module, name: str, layout: Layout) -> nn.Module:
    """Return the stage's substitute for a module that acts before or after the blocks."""
    module: nn.Module = getattr(owner, name)
    before, after = layout.is_first and name in layout.before, layout.is_last and name in layout.after
    if not before and not after:
        return nn.Identity()
    if name not in layout.before or name not in layout.after or (before and after):
        return module
    acting = OneOfTwo(module, acts_at=1 if before else 2)
    owner.register_forward_pre_hook(acting.begin)
    return acting


def keeps_fp32(model: PreTrainedModel, name: str) -> bool:
    """Return whether the family keeps this parameter in fp32 when the model is narrowed to bf16."""
    kept: Any = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(part in name for part in kept)
