"""The stock base model with some of its blocks and nothing else: what a server computes with. And the whole one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers import initialization as weight_init
from transformers.utils import logging

from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.imports.late_modules import has_run, run
from swarm_protocol.imports.light_imports import META_OPERATIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from swarm_protocol.checkpoints.checkpoint import Checkpoint
    from swarm_protocol.checkpoints.family import Family


class LeftOut(nn.Identity):
    """Stands for a linear layer that is not loaded with its block; a family's weight initialisation may touch it."""

    weight = torch.empty(0)
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    bias = None


class ZeroPositions(nn.Module):
    """Stands for learned position embeddings on a server, which receives hidden states that already contain them."""

    def forward(self, positions: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class RangesOnCpu(TorchFunctionMode):
    """Meanwhile ranges are made on the CPU, also where the meta device is the default, and what is computed from them.

    On the meta device, torch computes frequencies of positions in Python, for which it imports SymPy: 0.2 s and 37 MB
    at the start of a process.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.arange and options.get("device") is None:
            options["device"] = "cpu"
        try:
            return func(*args, **options)
        except RuntimeError:  # something on the meta device was among them
            return func(*map(_on_meta, args), **options)


class MetaOperations(TorchFunctionMode):
    """Runs torch's operations on the meta device that are in Python once one is needed, if they were put off."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError:
            if has_run(META_OPERATIONS):
                raise
            run(META_OPERATIONS)
            return func(*args, **(kwargs or {}))


def _on_meta(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_on_meta(each) for each in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def hollow_class(
    family: Family, hosted: Container[int], prepare: Callable[[nn.Module], None] | None = None
) -> type[PreTrainedModel]:
    """A subclass of the family's base model whose parts outside the blocks ``hosted`` have no parameters.

    ``from_pretrained(None, config=…, state_dict=…)`` of it loads the hosted blocks alone, under the names they have in
    a checkpoint. It takes the full config, since how a block is built may depend on its index. ``prepare`` is called
    with each hosted block before it gets its weights.
    """

    class HollowModel(family.base_class):  # type: ignore[name-defined,misc]
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            with (
                weight_init.no_init_weights(),
                RangesOnCpu(),
            ):  # all is on the meta device as yet, and most of it goes at once
                super().__init__(config, *args, **kwargs)
            _hollow_out(self, family, hosted)
            if prepare is not None:
                for index, block in enumerate(getattr(family.owner_of(self), family.blocks)):
                    if index in hosted:
                        prepare(block)

        def _init_weights(self, module: nn.Module) -> None:
            """Weights come from the checkpoint: only what none has, such as rotary frequencies, is computed here."""
            if any(True for _ in module.buffers()):
                with hosted_alone(self, family, hosted):
                    super()._init_weights(module)

    # Both names: transformers skips its weight conversions for classes that look like a user's own.
    HollowModel.__name__, HollowModel.__module__ = family.base_class.__name__, family.base_class.__module__
    return HollowModel


def load_hollow_model(
    family: Family,
    config: PreTrainedConfig,
    *,
    hosted: Container[int] = (),
    tensors: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module], None] | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Builds a hollow model on the CPU and loads ``tensors`` into it through the stock loader.

    ``prepare`` may take some out of ``tensors``.

    Returns the model and transformers' loading info (missing, unexpected and mismatched keys).
    """
    with hf_loader():
        loaded: Any = hollow_class(family, hosted, prepare).from_pretrained(
            None,
            config=config,
            state_dict={} if tensors is None else tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported, and refused with a sentence by the caller
            output_loading_info=True,
        )
    hollow, info = loaded  # a pair because of output_loading_info, of which transformers' annotations do not know
    return hollow, info


def load_whole_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the stock causal language model with all its blocks, in float32 on the CPU.

    Weights that are stored packed are unpacked, as a server unpacks them.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the model.
        UnsupportedModel: there is no causal language model of this type.
    """
    from transformers import AutoModelForCausalLM

    model_class: Any
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(checkpoint.config)]
    except KeyError:
        raise UnsupportedModel(f"models of type {checkpoint.config.model_type!r} write no text") from None
    with hf_loader():
        model, info = model_class.from_pretrained(
            None,
            config=checkpoint.config,
            state_dict=checkpoint.stored(lambda _name: True),
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # reported, and refused below
            output_loading_info=True,
        )
    checkpoint.require_fit(info)
    if checkpoint.generation_config is not None:
        model.generation_config = checkpoint.generation_config
    whole: PreTrainedModel = model.eval()
    return whole


_LOADER = threading.RLock()


@contextmanager
def hf_loader() -> Iterator[None]:
    """Held while transformers builds or loads a model; keeps it from drawing a bar and logging a report every time.

    Its loader sets process-wide state (default dtype, whether weights get initial values): two threads inside it at
    once leave weights unloaded in each other's models.
    """
    with _LOADER, nullcontext() if has_run(META_OPERATIONS) else MetaOperations():
        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


@contextmanager
def hosted_alone(base: nn.Module, family: Family, hosted: Container[int]) -> Iterator[None]:
    """Meanwhile the list of blocks has the hosted ones alone: a family's code expects to find its own blocks there."""
    owner = family.owner_of(base)
    blocks = getattr(owner, family.blocks)
    setattr(owner, family.blocks, nn.ModuleList(block for index, block in enumerate(blocks) if index in hosted))
    try:
        yield
    finally:
        setattr(owner, family.blocks, blocks)


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
