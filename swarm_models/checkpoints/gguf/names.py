"""The mapping from the tensors of a GGUF file to the tensors of the model, by transformers' tables of names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers import initialization as weight_init

from swarm_models.checkpoints.hollow_model import RangesOnCpu, hf_loader

_HEADS = ("num_attention_heads", "num_key_value_heads")  # by which processors take rows apart


@dataclass(frozen=True, eq=False)
class ModelNames:
    """The tensors of a model as transformers names them.

    Attributes:
        architecture: llama.cpp's name for the architecture.
        of_gguf: the name of the model's tensor, by llama.cpp's name of the tensor that is all or part of it.
        processor: reverts llama.cpp's changes to a family's tensors (``TensorProcessor`` of transformers).
    """

    architecture: str
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    of_gguf: Mapping[str, str] = field(repr=False)
    processor: Any = field(repr=False)

    def processor_for(self, share: Fraction) -> Any:
        """Return the processor for a ``share`` of a tensor's rows, which are whole heads if it changes heads."""
        config = self.processor.config
        heads = {name: int(config[name] * share) for name in _HEADS if config.get(name)}
        return self.processor if share == 1 else type(self.processor)(config={**config, **heads})


class _Names:
    """A stand-in model for ``get_gguf_hf_weights_map``, which would visit every submodule of a real model each time."""

    def __init__(self, config: PreTrainedConfig, names: Collection[str]) -> None:
        self.config, self._names = config, names

    def state_dict(self) -> Collection[str]:
        return self._names

    def named_children(self) -> Iterator[tuple[str, object]]:
        return iter(())


def model_names(config: PreTrainedConfig, architecture: str) -> ModelNames:
    """Return the names of a model's tensors.

    Raises NotImplementedError, or another error of transformers, if there is no table for the model.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with hf_loader(), torch.device("meta"), weight_init.no_init_weights(), RangesOnCpu():
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    make_processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = make_processor(config=config.to_dict())
    inside = f"{model.base_model_prefix}."  # bloom's files were converted from the base model
    of_base = [name.removeprefix(inside) for name in shapes if name.startswith(inside)]
    # transformers takes a llama that is named "mistral" for another model type, for which there is no table.
    table = "llama" if config.model_type == "mistral" else None
    of_gguf = get_gguf_hf_weights_map(_Names(config, of_base), processor, table, qual_name=inside)
    of_gguf |= get_gguf_hf_weights_map(_Names(config, list(shapes)), processor, table)
    return ModelNames(architecture, shapes, of_gguf, processor)
