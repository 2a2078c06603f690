"""The final norm, and the output head in int8, which takes a quarter of fp32's memory and time per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_models.kernels.int8_linear import fastest, quantize_rows
from swarm_models.kernels.quantized_linear import QuantizedLinear


class Int8Head(QuantizedLinear):
    """A frozen output head in int8, rounded from the weight of the head that it replaces.

    ``tied`` says whether the input embedding shared the weight. The embedding itself is not rounded.
    """

    def __init__(self, head: nn.Linear, tied: bool) -> None:
        super().__init__(fastest()(*quantize_rows(head.weight.detach())), head.bias)
        self.tied = tied


def check_head_quant(head_quant: str, device: torch.device) -> None:
    """Raise ValueError if a head cannot run with ``head_quant`` on this device."""
    if head_quant == "int8" and device.type != "cpu":
        raise ValueError(f"head_quant 'int8' runs on cpu, not on {device.type}: choose 'none'")


def quantize_head_(model: PreTrainedModel) -> None:
    """Replace the head that turns hidden states into token logits, if the model has one that is not int8 yet.

    A classifier's head stays as it is. The original weight is freed unless the input embedding shares the weight.
    """
    head = model.get_output_embeddings()
    if head is None or isinstance(head, Int8Head):
        return
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the head of this model is a {type(head).__name__}, expected a Linear: choose head_quant 'none'"
        )
    embeddings: Any = model.get_input_embeddings()
    _replace(model, head, Int8Head(head, tied=head.weight is embeddings.weight))


@contextmanager
def float_head(model: PreTrainedModel) -> Iterator[None]:
    """Turn an int8 head into a (tied) Linear inside the context, for code that replaces or writes the weight."""
    int8 = model.get_output_embeddings()
    if not isinstance(int8, Int8Head):
        yield
        return
    embeddings: Any = model.get_input_embeddings()
    embedding = embeddings.weight
    head = nn.Linear(int8.in_features, int8.out_features, bias=int8.bias is not None, device="meta")
    head.register_parameter("weight", embedding if int8.tied else nn.Parameter(int8.weight.to(embedding.dtype)))
    if int8.bias is not None:
        head.register_parameter("bias", nn.Parameter(int8.bias.detach().to(embedding.dtype, copy=True)))
    _replace(model, int8, head)
    try:
        yield
    finally:
        quantize_head_(model)


def _replace(model: PreTrainedModel, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    model.set_submodule(name, new.train(old.training))


def final_norm(owner: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the norm that ``owner`` applies after its blocks, in float32 on the CPU; the identity if there is none."""
    norms = [module for module in owner.children() if "norm" in type(module).__name__.lower()]
    if not norms:
        return lambda hidden: hidden

    @torch.no_grad()
    def normed(hidden: torch.Tensor) -> torch.Tensor:
        # BLOOM also has a norm before its blocks, so the last one is meant. NanoChat's norm has no parameters.
        weight = next(norms[-1].parameters(), hidden)
        result: torch.Tensor = norms[-1](hidden.to(weight.device, weight.dtype))
        return result.float().cpu()

    return normed
