"""The modules inside remote blocks, without their weights: PEFT finds them by name and puts its layers there.

The modules have the same classes, names and shapes as on servers. They compute nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from transformers import initialization as weight_init

from swarm_client.adapters.lora import INITS, require_supported
from swarm_client.model.model_pass import are_foreign
from swarm_models.checkpoints.family import Family
from swarm_models.checkpoints.hollow_model import named_like
from swarm_protocol.errors import RequestRejected
from swarm_protocol.wire.adapters import LowRank

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

INSTEAD = (
    "its hidden states can be had with output_hidden_states=True, by hooks on the block as a whole, or from "
    "model.blocks[a:b](hidden)"
)
# ``__torch_function__`` gets a method as it is, and an attribute of a tensor as the ``__get__`` of its descriptor.
_DEVICE, _DTYPE = (getattr(torch.Tensor, name).__get__ for name in ("device", "dtype"))
_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "requires_grad", "is_leaf")),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel),
}


@dataclass(frozen=True)
class ModuleLocation:
    """The location of a module: its block, and its path in the block, which is empty for the block itself."""

    blocks: HollowBlocks
    block: int
    path: str

    def of(self, child: str) -> ModuleLocation:
        return ModuleLocation(self.blocks, self.block, f"{self.path}.{child}" if self.path else child)

    def __str__(self) -> str:
        return f"{self.path} of block {self.block}" if self.path else f"block {self.block}"


class HollowBlocks:
    """The modules inside a model's remote blocks, and the layers that PEFT has put there.

    Attributes:
        layers: PEFT's layers, by block and path.
    """

    def __init__(
        self, model: PreTrainedModel, family: Family, config: PreTrainedConfig, in_place: Sequence[nn.Module]
    ) -> None:
        """Fill the modules ``in_place``, which stand for the blocks. The caller must hold ``hf_loader``."""
        base = _on_meta(family.base_class, config)
        self.model = model
        self.layers: dict[tuple[int, str], Any] = {}
        self._originals: dict[tuple[int, str], nn.Module] = {}
        self._trained_before: list[tuple[nn.Parameter, bool]] | None = None
        for index, (block, stands_for_it) in enumerate(
            zip(getattr(family.owner_of(base), family.blocks), in_place, strict=True)
        ):
            for path, module in list(block.named_modules())[1:]:
                self._originals[index, path] = module
                _hollow_out(module, ModuleLocation(self, index, path))
            vars(stands_for_it)["place"] = ModuleLocation(self, index, "")
            stands_for_it._modules.update(block.named_children())

    # ---------------------------------------------------------------- PEFT's layers

    def put(self, place: ModuleLocation, module: nn.Module) -> None:
        """Check and record ``module`` before it is set at ``place``.

        Raises:
            RequestRejected: servers cannot compute ``module``.
        """
        key = place.block, place.path
        original = self._originals.get(key)
        if module is original:
            self.layers.pop(key, None)
        elif original is not None:
            self._require_lora(place, module)
            if not self.layers:  # PEFT will freeze the model after it has put its layers
                self._trained_before = [(p, p.requires_grad) for p in self.model.parameters()]
            self.layers[key] = module

    def accept(self) -> None:
        """Keep the layers once PEFT has added all of them without a refusal, and make their ``merge`` raise."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._trained_before = None
        for module in self.model.modules() if self.layers else ():
            if isinstance(module, BaseTunerLayer):
                vars(module)["merge"] = _refuse_merging

    def refuse(self, reason: str) -> NoReturn:
        """Raise RequestRejected. Remove all of PEFT's layers first, if PEFT is adding the model's first adapter."""
        if self._configs() is None:
            self.undo()
        raise RequestRejected(reason)

    def _configs(self) -> dict[str, Any] | None:
        """Return the configs of the adapters in the model or its base model; None if PEFT never finished."""
        found = (getattr(model, "peft_config", None) for model in (self.model, self.model.base_model))
        return next((configs for configs in found if configs is not None), None)

    def undo(self) -> None:
        """Remove PEFT's layers from the whole model, and restore which parameters are trained."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper

        for name, module in list(self.model.named_modules()):
            parent, _, child = name.rpartition(".")
            if isinstance(module, BaseTunerLayer):
                setattr(self.model.get_submodule(parent), child, module.get_base_layer())
            elif isinstance(module, AuxiliaryTrainingWrapper):
                setattr(self.model.get_submodule(parent), child, module.original_module)
        for parameter, was_trained in self._trained_before or ():
            parameter.requires_grad_(was_trained)
        self._trained_before = None

    def low_rank(self) -> Iterator[LowRank]:
        """Yield the layers of the active adapter, unless adapters are disabled; the tensors are its parameters.

        Raises:
            ValueError: a layer has something, from PEFT or from the user, that servers cannot compute.
        """
        configs = dict(self._configs() or {})
        for (block, path), layer in list(self.layers.items()):
            self._require_no_hooks(layer, block, path)
            names = () if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
            if len(names) > 1:
                raise RequestRejected(f"adapters {names} cannot all be active: choose one")
            for name in names:
                if name in configs:  # an adapter beside an accepted one is checked only when it is used
                    require_supported(configs.pop(name))
                self._require_low_rank(layer, name, block, path)
                a, b = layer.lora_A[name], layer.lora_B[name]
                self._require_no_hooks(a, block, path)
                self._require_no_hooks(b, block, path)
                dropout = getattr(layer.lora_dropout[name], "p", 0.0)
                yield LowRank(block, path, layer.scaling[name], a.weight, b.weight, dropout)

    def _require_lora(self, place: ModuleLocation, module: nn.Module) -> None:
        from peft.tuners.lora import Linear, LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer

        if not isinstance(module, BaseTunerLayer):
            self.refuse(f"{place} is computed on servers: a {type(module).__name__} cannot take its place")
        if "experts" in place.path.split("."):
            self.refuse(f"target_modules reaches experts ({place}): name linear layers outside them")
        if not isinstance(module, LoraLayer):
            self.refuse(f"{place} cannot have an adapter other than LoRA: remote blocks take a peft.LoraConfig")
        if type(module) is not Linear:
            self.refuse(
                f"target_modules names {place}, a {type(module.get_base_layer()).__name__}: expected linear layers"
            )
        for name in module.lora_A:
            self._require_low_rank(module, name, place.block, place.path)

    def _require_low_rank(self, layer: Any, name: str, block: int, path: str) -> None:
        if layer.lora_variant.get(name) or layer.lora_B[name].bias is not None:
            place = ModuleLocation(self, block, path)
            self.refuse(f"adapter {name!r} in {place} is more than a low-rank product, which is all that servers add")

    def _require_no_hooks(self, module: nn.Module, block: int, path: str) -> None:
        hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        if any(hooks):
            place = ModuleLocation(self, block, path)
            self.refuse(f"a hook on a layer in {place} would never run: it is computed on servers; {INSTEAD}")


def _refuse_merging(*_args: Any, **_kwargs: Any) -> None:
    raise RequestRejected(
        "an adapter cannot be merged into blocks that are on servers: save it, and merge it into the whole model"
    )


# ---------------------------------------------------------------- modules


class Inside(nn.Module):
    """A block, or a module inside a block, which checks every module that replaces one of its children.

    Attributes:
        place: the module's location; None until the modules of all blocks exist.
    """

    place: ModuleLocation | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if self.place is not None and isinstance(value, nn.Module):
            self.place.blocks.put(self.place.of(name), value)
        super().__setattr__(name, value)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the parameters that PEFT has put here.

        Without any, ``next`` raises an error that says why. Code that wants a dtype often takes the first parameter.
        """
        found = list(super().parameters(recurse))
        return iter(found) if found or self.place is None else map(_end_of_parameters, [self.place])


class _NoParameters(RequestRejected, StopIteration):
    """The error at the end of a module without parameters. It ends loops, as any ``StopIteration`` does."""


def _end_of_parameters(place: ModuleLocation) -> NoReturn:
    raise _NoParameters(
        f"{place} has no parameters here, because its weights are on servers. Of PEFT's adapters, remote blocks take "
        "those of a peft.LoraConfig"
    )


class Hollow(Inside):
    """A module inside a block, without weights. ``_hollow_class`` combines this class with the module's own class."""

    place: ModuleLocation

    def forward(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RequestRejected(f"{self.place} is computed on servers, and not by its module here: {INSTEAD}")

    def register_forward_hook(self, hook: Any, **options: Any) -> Any:
        if are_foreign({0: hook}):  # transformers' own hooks, which collect hidden states, may stay: they never run
            self._refuse_hook()
        return super().register_forward_hook(hook, **options)

    def _refuse_hook(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RequestRejected(f"{self.place} is computed on servers, where a hook cannot run: {INSTEAD}")

    register_forward_pre_hook = _refuse_hook
    register_backward_hook = register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook

    def __getattr__(self, name: str) -> Any:
        if name == "parametrizations":  # PEFT reads this when it looks for parameters instead of modules
            self.place.blocks.refuse(
                "target_modules reaches experts, or target_parameters is set: servers add to linear layers outside "
                "experts only"
            )
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"{self.place} is computed on servers and has no {name!r} here: {INSTEAD}") from None

    def __deepcopy__(self, _memo: dict) -> NoReturn:
        self.place.blocks.refuse(
            f"{self.place} cannot be copied, nor can modules_to_save name it: its weights are on servers; leave it out"
        )


class WeightOnServers(torch.Tensor):
    """A block's parameter without values. PEFT reads its shape, and takes its device and dtype for adapters."""

    place: ModuleLocation

    def __new__(cls, parameter: torch.Tensor, _place: ModuleLocation) -> WeightOnServers:
        return parameter.detach().as_subclass(cls)

    def __init__(self, _parameter: torch.Tensor, place: ModuleLocation) -> None:
        self.place = place

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        weight: Any = next((argument for argument in args if isinstance(argument, cls)), None)
        if function == _DEVICE:
            return weight.place.blocks.model.device
        if function == _DTYPE:
            return weight.place.blocks.model.dtype
        if function in _METADATA:
            return super().__torch_function__(function, types, args, kwargs or {})
        reason = (
            f"{'a weight' if weight is None else weight.place} is on servers, only its shape, dtype and device are "
            "known here: an adapter can neither have use_dora=True nor an init_lora_weights other than "
            f"{', '.join(map(repr, INITS))}"
        )
        if weight is None:
            raise RequestRejected(reason)
        return weight.place.blocks.refuse(reason)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WeightOnServers({self.place}, shape={tuple(self.shape)})"


@cache
def _hollow_class(own: type[nn.Module]) -> type[Hollow]:
    return named_like(own, Hollow, own)


def _hollow_out(module: nn.Module, place: ModuleLocation) -> None:
    """Remove the tensors of ``module``, so that nothing counts, moves or saves them."""
    for name, parameter in list(module._parameters.items()):
        del module._parameters[name]
        vars(module)[name] = None if parameter is None else WeightOnServers(parameter, place.of(name))
    for name in list(module._buffers):
        del module._buffers[name]
    vars(module)["place"] = place
    module.__class__ = _hollow_class(type(module))  # type: ignore[arg-type]  # classes can be hashed


def _on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model whose tensors have shapes but no values."""
    config = copy.deepcopy(config)
    config.update({"_attn_implementation_internal": "eager"})
    with weight_init.no_init_weights(), torch.device("meta"):
        return model_class(config)
