"""The stock base model with only some of its blocks, as a server runs it; and the loader of the whole model."""

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

    from swarm_models.checkpoints.checkpoint import ModelCheckpoint
    from swarm_models.checkpoints.family import Family


class LeftOut(nn.Identity):
    """A placeholder for a linear layer that is not loaded with its block; weight initialisation may access it."""

    weight = torch.empty(0)
    weight._is_hf_initialized = True  # type: ignore[attr-defined]  # so that initialisation skips it
    bias = None


class ZeroPositions(nn.Module):
    """A replacement for learned position embeddings on a server, whose input hidden states already contain them."""

    def forward(self, positions: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class RangesOnCpu(TorchFunctionMode):
    """A context that computes ``torch.arange`` and its results on the CPU, even if the meta device is the default.

    On the meta device, torch computes position frequencies in Python, which imports SymPy: 0.2 s and 37 MB at startup.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.arange and options.get("device") is None:
            options["device"] = "cpu"
        try:
            return func(*args, **options)
        except RuntimeError:  # an argument was on the meta device
            return func(*map(_on_meta, args), **options)


class MetaOperations(TorchFunctionMode):
    """A context that runs the deferred import of torch's Python meta operations once an operation needs them."""

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
    """Return a subclass of the family's base model whose parts outside the blocks ``hosted`` have no parameters.

    Its ``from_pretrained(None, config=…, state_dict=…)`` loads the hosted blocks alone, under their names in the
    checkpoint. It takes the full config, because the structure of a block may depend on its index. ``prepare`` is
    called with each hosted block before the block gets its weights.
    """

    class HollowModel(family.base_class):  # type: ignore[name-defined,misc]
        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            with weight_init.no_init_weights(), RangesOnCpu():  # on the meta device; most of it is dropped at once
                super().__init__(config, *args, **kwargs)
            _hollow_out(self, family, hosted)
            if prepare is not None:
                for index, block in enumerate(getattr(family.owner_of(self), family.blocks)):
                    if index in hosted:
                        prepare(block)

        def _init_weights(self, module: nn.Module) -> None:
            """Compute only what no checkpoint has, such as rotary frequencies; the weights come from the checkpoint."""
            if any(True for _ in module.buffers()):
                with hosted_alone(self, family, hosted):
                    super()._init_weights(module)

    return named_like(family.base_class, HollowModel)


def named_like(stock: type, *bases: type) -> type[Any]:
    """Return a class of these bases with a stock one's names, by which transformers finds its weight conversions."""
    return type(stock.__name__, bases, {"__module__": stock.__module__, "__qualname__": stock.__qualname__})


def load_hollow_model(
    family: Family,
    config: PreTrainedConfig,
    *,
    hosted: Container[int] = (),
    tensors: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[nn.Module], None] | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a hollow model on the CPU and load ``tensors`` into it with the stock loader.

    ``prepare`` may remove entries from ``tensors``.

    Returns the model and transformers' loading info (missing, unexpected and mismatched keys).
    """
    return load_tensors(hollow_class(family, hosted, prepare), config, {} if tensors is None else tensors, dtype)


def load_tensors(
    model_class: Any, config: PreTrainedConfig, tensors: dict[str, Any], dtype: torch.dtype | str
) -> tuple[Any, dict[str, Any]]:
    """Build a model on the CPU, and load ``tensors`` into it with the stock loader; return its loading info, too."""
    with hf_loader():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # the caller reports mismatches as an error
            output_loading_info=True,
        )
    return model, info


def load_whole_model(checkpoint: ModelCheckpoint) -> PreTrainedModel:
    """Return the stock causal language model with all its blocks, in float32 on the CPU.

    Packed weights are unpacked in the same way as on a server.

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
    model, info = load_tensors(model_class, checkpoint.config, checkpoint.stored(lambda _name: True), torch.float32)
    checkpoint.require_fit(info)
    if checkpoint.generation_config is not None:
        model.generation_config = checkpoint.generation_config
    whole: PreTrainedModel = model.eval()
    return whole


_LOADER = threading.RLock()  # reentrant, because a family is described, and a hollow model loaded, within the context


@contextmanager
def hf_loader() -> Iterator[None]:
    """Serialise and silence transformers while it builds or loads a model: no progress bar, no report.

    The loader sets process-wide state (default dtype, whether weights get initial values). Two threads inside the
    loader at once leave weights unloaded in each other's models.
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
    """Reduce the list of blocks to the hosted ones while the context is active.

    A family's code expects its own blocks there, and not the placeholders of the others.
    """
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
