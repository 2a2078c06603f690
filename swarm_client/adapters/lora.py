"""LoRA in remote blocks. PEFT decides where adapters go and how they begin, and the client keeps their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations import peft as hf_peft

from swarm_models.checkpoints.files import LocalFiles
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_models.checkpoints.peft_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    adapted_modules,
    named_patterns,
    read_config,
    require_names,
)
from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.failures import first_line, undone_on_error

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel as StockModel  # the class that the mixin extends
else:
    StockModel = object

INITS = (True, False, "gaussian", "orthogonal")  # the initial values that do not depend on the model's weights
_OTHER_FORMULAS = (  # options of LoraConfig whose formula is not scaling * B(A(dropout(x)))
    *("use_dora", "lora_bias", "target_parameters", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("velora_config", "monteclora_config", "alora_invocation_tokens", "layer_replication", "megatron_config"),
)

# transformers 5.24 requires PEFT 0.22, which is newer than the newest PEFT on PyPI. Except for this number, its code
# for adapters is that of 5.23, which accepts 0.20. Without this line, no model of the process could have an adapter.
if getattr(hf_peft, "MIN_PEFT_VERSION", "") == "0.22.0":
    hf_peft.MIN_PEFT_VERSION = "0.20.0"


def require_supported(config: Any) -> None:
    """Raise ValueError, which names the option, if servers cannot do what a PEFT config asks for."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ValueError(f"adapter_config is a {type(config).__name__}: remote blocks take a peft.LoraConfig")
    for name in _OTHER_FORMULAS:
        if getattr(config, name, None):
            raise ValueError(f"{name} is not possible in remote blocks, which add low-rank products only: leave it out")
    if config.bias != "none":
        raise ValueError(f"bias={config.bias!r} would train weights of the servers: choose bias='none'")
    if config.init_lora_weights not in INITS:
        raise ValueError(
            f"init_lora_weights={config.init_lora_weights!r} needs the weights of the blocks, which are on servers: "
            f"choose one of {', '.join(map(repr, INITS))}"
        )


class LoraMixin(StockModel):
    """A mixin that adapts transformers' ``PeftAdapterMixin`` and PEFT's wrappers to a model with remote blocks."""

    _remote_blocks: list[Any]

    @property
    def peft_config(self) -> dict[str, Any]:
        """Return PEFT's configs by adapter name. Code that puts layers into the model sets this property afterwards.

        Raises:
            RequestRejected: the property is set, but servers cannot compute the layers in the blocks.
        """
        if "_peft_config" not in self.__dict__:  # PEFT asks whether the attribute exists
            raise AttributeError("peft_config")
        configs: dict[str, Any] = self.__dict__["_peft_config"]
        return configs

    @peft_config.setter
    def peft_config(self, configs: dict[str, Any]) -> None:
        remote = self._remote_blocks[0]
        if remote.hollow.layers:
            try:
                _require_no_other(remote.adapter_name)
                for config in configs.values():
                    require_supported(config)
            except ValueError as error:
                remote.hollow.refuse(str(error))
        remote.hollow.accept()
        self.__dict__["_peft_config"] = configs

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]

    def add_adapter(self, adapter_config: LoraConfig, adapter_name: str | None = None) -> None:
        """Add low-rank matrices to the remote blocks, and train nothing else.

        PEFT handles targets, initial values and ``modules_to_save``. Torch's random state decides the initial values,
        as for a local model.

        Raises:
            ValueError: servers or PEFT cannot do one of the options. Then nothing is changed.
        """
        require_supported(adapter_config)
        remote = self._remote_blocks[0]
        _require_no_other(remote.adapter_name)
        before = set(getattr(self, "peft_config", ()))
        with (
            hf_loader(),  # another thread that loads a model switches off initial values in the whole process
            undone_on_error(lambda: self._remove_new(adapter_name or "default", before)),
            self._prompts_as_they_are(),
        ):
            super().add_adapter(adapter_config, adapter_name)

    def _remove_new(self, name: str, before: Collection[str]) -> None:
        """Remove what PEFT has done to add this adapter. ``before``: the names of the adapters that were there."""
        if not before:
            self._remote_blocks[0].hollow.undo()
            self._hf_peft_config_loaded = False
        elif name in self.peft_config and name not in before:
            self.delete_adapter(name)

    def load_adapter(  # type: ignore[override]
        self,
        peft_model_id: str | PathLike[str],
        adapter_name: str | None = None,
        *,
        trainable: bool = False,
        is_trainable: bool = False,
        **hub_options: Any,
    ) -> None:
        """Add an adapter that was saved in PEFT's format, here or elsewhere.

        The config may come from a stranger. Therefore ``re`` does not run its regular expressions; the target modules
        are read from the tensors' names instead.

        Args:
            trainable: whether the adapter will be trained further.
            is_trainable: PEFT's name for ``trainable``.
            hub_options: arguments of ``huggingface_hub.hf_hub_download`` for an adapter on the hub: ``revision``, …

        Raises:
            ValueError: as in ``add_adapter``, or the files do not fit their config or this model.
            CheckpointError: the files cannot be read, or have numbers or patterns that make no sense.
        """
        from peft import set_peft_model_state_dict

        directory = _directory(str(peft_model_id), **hub_options)
        stored = read_header(LocalFiles(directory).path(WEIGHTS_NAME))
        trainable = trainable or is_trainable
        config = _config(directory, adapted_modules(stored), trainable)
        tensors = {name.removeprefix("base_model.model."): tensor.read() for name, tensor in stored.items()}
        adapter_name = adapter_name or "default"
        with torch.random.fork_rng(devices=()):  # the initial values are overwritten
            self.add_adapter(config, adapter_name)
        try:
            result: Any = set_peft_model_state_dict(self, tensors, adapter_name=adapter_name)
            wrong = [*result.unexpected_keys, *(key for key in result.missing_keys if f".{adapter_name}." in key)]
            if wrong:
                raise ValueError(f"tensor {wrong[0]} is not in both")
        except (ValueError, KeyError, RuntimeError) as error:
            self.delete_adapter(adapter_name)
            reason = str(error).splitlines()[-1].strip()  # torch's first line only names the class that was loaded
            raise ValueError(
                f"the adapter in {peft_model_id} does not fit its config or this model: {reason}"
            ) from None
        if not trainable:
            with self._prompts_as_they_are():
                self.requires_grad_(False)

    @contextmanager
    def _prompts_as_they_are(self) -> Iterator[None]:
        """Keep which prompts are trained, because PEFT freezes everything except the adapter."""
        prompts = self._remote_blocks[0].prompts
        before = () if prompts is None else [(parameter, parameter.requires_grad) for parameter in prompts.parameters()]
        try:
            yield
        finally:
            for parameter, is_trained in before:
                parameter.requires_grad_(is_trained)

    def set_adapter(self, adapter_name: list[str] | str) -> None:
        """Set the adapter that is used from now on. Raise ValueError for more than one."""
        if not isinstance(adapter_name, str) and len(adapter_name) != 1:
            raise ValueError(f"adapters {adapter_name} cannot all be active: choose one")
        super().set_adapter(adapter_name)


def _directory(name_or_path: str, subfolder: str | None = None, **hub_options: Any) -> Path:
    """Return the directory of the adapter's files, which are downloaded if they are on the hub."""
    from huggingface_hub import hf_hub_download

    directory = Path(name_or_path, subfolder or "")
    if directory.is_dir():
        return directory
    try:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            path = Path(hf_hub_download(name_or_path, name, subfolder=subfolder, **hub_options))
    except (OSError, ValueError) as error:  # includes every error of huggingface_hub
        reason = first_line(error)
        raise ValueError(f"adapter {name_or_path} is neither a directory nor one on the hub: {reason}") from None
    return path.parent


def _config(directory: Path, modules: list[str], trainable: bool) -> Any:
    """Return PEFT's config for an adapter of these modules, without expressions that could make PEFT hang."""
    from peft import PeftConfig

    written = read_config(directory)
    for name in ("modules_to_save", "layers_pattern"):
        require_names(written.get(name), directory, name)
    for name in ("target_modules", "exclude_modules"):
        if not isinstance(written.get(name), str):  # an expression, which is replaced below
            require_names(written.get(name), directory, name)
    try:
        config: Any = PeftConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{directory / CONFIG_NAME} is no config of PEFT: {' '.join(str(error).split())}") from None
    changes: dict[str, Any] = {
        "rank_pattern": named_patterns(config.rank_pattern or {}, modules, directory),
        "alpha_pattern": named_patterns(config.alpha_pattern or {}, modules, directory),
        "inference_mode": not trainable,
    }
    if isinstance(config.target_modules, str) or isinstance(config.exclude_modules, str):
        changes |= {"target_modules": set(modules), "exclude_modules": None}
    return replace(config, **changes)


def _require_no_other(of_servers: str) -> None:
    """Raise ValueError if the model uses an adapter of the servers."""
    if of_servers:
        raise ValueError(f"the model uses adapter {of_servers!r} of the servers: it cannot have another")
