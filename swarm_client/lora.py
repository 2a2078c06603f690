"""LoRA in remote blocks: PEFT says where adapters go and how they begin; the client keeps their parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import initialization as weight_init

from swarm_protocol.adapters import LowRank
from swarm_protocol.families import Family
from swarm_protocol.shell import stock_loader

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import Linear
    from transformers import PreTrainedConfig, PreTrainedModel

_INITS = (True, False, "gaussian", "orthogonal")  # those that do not look at the model's weights
_OTHER_FORMULAS = (  # options of LoraConfig that compute something else than scaling * B(A(dropout(x)))
    *("use_dora", "lora_bias", "target_parameters", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("velora_config", "monteclora_config", "alora_invocation_tokens", "layer_replication", "megatron_config"),
)


def require_supported(config: Any) -> None:
    """Raises ValueError, naming the option, if servers cannot do what a PEFT config asks for."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ValueError(f"adapter_config is a {type(config).__name__}: remote blocks take a peft.LoraConfig")
    for name in _OTHER_FORMULAS:
        if getattr(config, name, None):
            raise ValueError(f"{name} is not possible in remote blocks, which add low-rank products only: leave it out")
    if config.bias != "none":
        raise ValueError(f"bias={config.bias!r} would train weights of the servers: choose bias='none'")
    if config.init_lora_weights not in _INITS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} needs the weights of the blocks, which are on servers: "
            f"choose one of {', '.join(map(repr, _INITS))}"
        )


class Skeleton:
    """A model's blocks as modules of their names and shapes, without weights, for PEFT to put its layers into.

    Attributes:
        parameters: those of the layers, as a module, under the names they have in the blocks.
    """

    def __init__(self, family: Family, config: PreTrainedConfig) -> None:
        self.blocks = _blocks(family, config)
        self._layers: dict[str, Linear] = {}
        self.parameters = nn.Module()

    def read(self, device: torch.device) -> None:
        """To be called whenever PEFT has changed something."""
        self._layers = {name: layer for name, layer in self.blocks.named_modules() if _is_lora(layer)}
        self.parameters = nn.Module()
        for name, layer in self._layers.items():
            place = _submodule(self.parameters, name)
            place.lora_A, place.lora_B = layer.lora_A, layer.lora_B
        self.parameters.to(device)

    def low_rank(self) -> Iterator[LowRank]:
        """Of the active adapter, if adapters are not disabled; the tensors are its parameters."""
        for path, layer in self._layers.items():
            block, _, module = path.partition(".")
            for name in () if layer.disable_adapters else layer.active_adapters:
                if name in layer.lora_A:
                    dropout = getattr(layer.lora_dropout[name], "p", 0.0)
                    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                    yield LowRank(int(block), module, layer.scaling[name], a, b, dropout)


class LoraMixin:
    """transformers' ``PeftAdapterMixin`` for a model whose blocks are remote.

    While it works, a skeleton stands where the blocks were.
    """

    _skeleton: Skeleton | None = None
    _adds_adapter = False

    @property
    def peft_config(self) -> dict[str, Any]:
        """PEFT's configs, by the names of adapters. PEFT sets it when it has put its layers into the model.

        Raises:
            ValueError: when a wrapper of PEFT's own sets it, and its layers should also be in the blocks.
        """
        if "_peft_config" not in self.__dict__:
            raise AttributeError("peft_config")
        return self.__dict__["_peft_config"]

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        stock_class, family = type(self).stock_class, self._family
        if not self._adds_adapter:
            for config in configs.values():
                if _blocks_with_layers(stock_class, family, self.config, copy.deepcopy(config))[1]:
                    _remove_layers(self)
                    raise ValueError(
                        "PEFT's wrappers reach what is on this machine only, but this adapter is for the blocks too, "
                        "which are on servers: use model.add_adapter(config), or model.load_adapter(path)"
                    )
        self.__dict__["_peft_config"] = configs

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]

    def add_adapter(self, adapter_config: LoraConfig, adapter_name: str | None = None) -> None:
        """Adds low-rank matrices to the remote blocks and makes them all there is to train.

        Targets, initial values and ``modules_to_save`` are PEFT's. Torch's random state decides the initial values, as
        it does on the local model.

        Raises:
            ValueError: an option that servers cannot do, or that PEFT refuses. Nothing is changed then.
        """
        require_supported(adapter_config)
        remote = self._remote_blocks[0]
        if remote.adapter_name:
            raise ValueError(f"the model uses adapter {remote.adapter_name!r} of the servers: it cannot have another")
        with stock_loader():  # while another thread loads a model, nothing gets initial values
            _rehearse(type(self).stock_class, self._family, self.config, adapter_config)
            if self._skeleton is None:
                self._skeleton = remote.skeleton = Skeleton(self._family, self.config)
            self._adds_adapter = True
            try:
                with self._with_skeleton():
                    super().add_adapter(adapter_config, adapter_name)
            finally:
                self._adds_adapter = False

    def load_adapter(
        self,
        peft_model_id: str | PathLike[str],
        adapter_name: str | None = None,
        *,
        trainable: bool = False,
        is_trainable: bool = False,
        **hub_options: Any,
    ) -> None:
        """Adds an adapter that was saved by PEFT, by ``save_pretrained`` here or anywhere.

        Args:
            trainable, is_trainable: it is to be trained on; both names mean the same.
            hub_options: see ``PeftConfig.from_pretrained``.

        Raises:
            ValueError: as ``add_adapter``, or the files do not fit their config or this model.
        """
        from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict

        config = PeftConfig.from_pretrained(str(peft_model_id), **hub_options)
        tensors = load_peft_weights(str(peft_model_id), device="cpu", **hub_options)
        tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
        trainable = trainable or is_trainable
        config.inference_mode = not trainable
        adapter_name = adapter_name or "default"
        with torch.random.fork_rng(devices=()):  # of what is overwritten
            self.add_adapter(config, adapter_name)
        with self._with_skeleton():
            try:
                result = set_peft_model_state_dict(self, tensors, adapter_name=adapter_name)
                wrong = [*result.unexpected_keys, *(key for key in result.missing_keys if f".{adapter_name}." in key)]
                if wrong:
                    raise ValueError(f"tensor {wrong[0]} is not in both")
            except (ValueError, KeyError, RuntimeError) as error:
                super().delete_adapter(adapter_name)
                reason = str(error).splitlines()[-1].strip()
                raise ValueError(
                    f"the adapter in {peft_model_id} does not fit its config or this model: {reason}"
                ) from None
            if not trainable:
                self.requires_grad_(False)

    def set_adapter(self, adapter_name: list[str] | str) -> None:
        """The adapter used from now on; one at a time."""
        if not isinstance(adapter_name, str) and len(adapter_name) != 1:
            raise ValueError(f"adapters {adapter_name} cannot all be active: choose one")
        with self._with_skeleton():
            super().set_adapter(adapter_name)

    def disable_adapters(self) -> None:
        with self._with_skeleton():
            super().disable_adapters()

    def enable_adapters(self) -> None:
        with self._with_skeleton():
            super().enable_adapters()

    def active_adapters(self) -> list[str]:
        with self._with_skeleton():
            return super().active_adapters()

    def delete_adapter(self, adapter_names: list[str] | str) -> None:
        with self._with_skeleton():
            super().delete_adapter(adapter_names)

    def get_adapter_state_dict(self, adapter_name: str | None = None, state_dict: dict | None = None) -> dict:
        """Under PEFT's names; ``state_dict`` has others, and is not looked at."""
        with self._with_skeleton():
            return super().get_adapter_state_dict(adapter_name)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """The stock method: of a model with an adapter it writes the adapter alone, in PEFT's format."""
        with self._with_skeleton():
            return super().save_pretrained(*args, **kwargs)

    @contextmanager
    def _with_skeleton(self) -> Iterator[None]:
        skeleton, owner, name = self._skeleton, self._owners[0], self._family.blocks
        blocks = getattr(owner, name)
        if skeleton is None or blocks is skeleton.blocks:
            yield
            return
        setattr(owner, name, skeleton.blocks)
        try:
            yield
        finally:
            setattr(owner, name, blocks)
            skeleton.read(self.device)
            self._remote_blocks[0].lora = skeleton.parameters


def _blocks(family: Family, config: PreTrainedConfig) -> nn.ModuleList:
    """The blocks of a model, whose parameters have shapes but no memory of their own."""
    base = _on_meta(family.base_class, config)
    blocks = getattr(family.owner_of(base), family.blocks)
    for module in blocks.modules():
        for name, parameter in module.named_parameters(recurse=False):
            hollow = torch.zeros(()).expand(
                parameter.shape
            )  # on the CPU: PEFT makes its own parameters where these are
            setattr(module, name, nn.Parameter(hollow, requires_grad=False))
    return blocks


def _rehearse(
    stock_class: type[PreTrainedModel], family: Family, config: PreTrainedConfig, adapter_config: LoraConfig
) -> None:
    """Lets PEFT put its layers into a model without weights; raises ValueError if some could not work."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    adapter_config = copy.deepcopy(adapter_config)
    blocks, _ = _blocks_with_layers(stock_class, family, config, adapter_config)
    if adapter_config.target_parameters:  # which PEFT makes of targets among fused experts
        raise ValueError(
            f"target_modules reaches experts ({', '.join(sorted(adapter_config.target_parameters))}): "
            "name linear layers outside them"
        )
    found = [(name, module) for name, module in blocks.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, module in found:
        if "experts" in name.split("."):
            raise ValueError(f"target_modules reaches experts ({name}): name linear layers outside them")
        if not _is_lora(module):
            raise ValueError(
                f"target_modules names {name!r} of the blocks, a {type(module.get_base_layer()).__name__}: "
                "expected linear layers"
            )
    for name, module in blocks.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ValueError(f"modules_to_save names {name!r}, whose weights are on servers: leave it out")


def _blocks_with_layers(
    stock_class: type[PreTrainedModel], family: Family, config: PreTrainedConfig, adapter_config: Any
) -> tuple[nn.Module, bool]:
    """The blocks of a model without weights into which PEFT has put its layers, and whether any are there."""
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    model = _on_meta(stock_class, config)
    with torch.random.fork_rng(devices=()):
        inject_adapter_in_model(adapter_config, model, low_cpu_mem_usage=True)
    base = next(module for module in model.modules() if isinstance(module, family.base_class))
    blocks = getattr(family.owner_of(base), family.blocks)
    return blocks, any(isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) for module in blocks.modules())


def _remove_layers(model: PreTrainedModel) -> None:
    """Puts the model's own modules back where PEFT has put layers around them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if isinstance(module, BaseTunerLayer):
            setattr(model.get_submodule(parent), child, module.get_base_layer())
        elif isinstance(module, AuxiliaryTrainingWrapper):
            setattr(model.get_submodule(parent), child, module.original_module)


def _on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config._attn_implementation_internal = "eager"
    with weight_init.no_init_weights(), torch.device("meta"):
        return model_class(config)


def _is_lora(module: nn.Module) -> bool:
    from peft.tuners.lora import Linear

    return type(module) is Linear


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module under this path, made if it is not there."""
    for name in path.split("."):
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    return root
