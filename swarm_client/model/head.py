"""The output head in int8: a quarter of the memory, and of the time per token, that it takes in fp32; and the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_protocol.kernels.int8_linear import Int8Linear


class Int8Head(Int8Linear):
    """A frozen head, rounded from the weight the model had when it was made.

    ``tied`` says whether that was the input embedding's, which is not rounded.
    """

    tied = False


def check_head_quant(head_quant: str, device: torch.device) -> None:
    """Raises ValueError if the head cannot be had like this."""
    if head_quant == "int8" and device.type != "cpu":
        raise ValueError(f"head_quant 'int8' runs on cpu, not on {device.type}: choose 'none'")


def quantize_head_(model: PreTrainedModel) -> None:
    """Replaces the head that turns hidden states into logits of tokens, if the model has one and it is not int8 yet.

    A classifier's head is not one of these. The original weight is freed unless the input embedding has it too.
    """
    head = model.get_output_embeddings()
    if head is None or isinstance(head, Int8Head):
        return
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the head of this model is a {type(head).__name__}, expected a Linear: choose head_quant 'none'"
        )
    int8 = Int8Head.from_float(head.weight, head.bias)
    embeddings: Any = model.get_input_embeddings()
    int8.tied = head.weight is embeddings.weight
    _replace(model, head, int8)


@contextmanager
def float_head(model: PreTrainedModel) -> Iterator[None]:
    """Inside, a head in int8 is a Linear again, tied if it was, for code that replaces or writes the weight."""
    int8 = model.get_output_embeddings()
    if not isinstance(int8, Int8Head):
        yield
        return
    embeddings: Any = model.get_input_embeddings()
    embedding = embeddings.weight
    head = nn.Linear(int8.in_features, int8.out_features, bias=int8.bias is not None, device="meta")
    head.weight = embedding if int8.tied else nn.Parameter(int8.weight.to(embedding.dtype))
    if int8.bias is not None:
        head.bias = nn.Parameter(int8.bias.detach().to(embedding.dtype, copy=True))
    _replace(model, int8, head)
    try:
        yield
    finally:
        quantize_head_(model)


def _replace(model: PreTrainedModel, old: nn.Module, new: nn.Module) -> None:
    name = next(name for name, module in model.named_modules() if module is old)
    model.set_submodule(name, new.train(old.training))


def final_norm(owner: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the module that has the blocks does after them, on the CPU in float32; nothing if it has no norm."""
    norms = [module for module in owner.children() if "norm" in type(module).__name__.lower()]
    if not norms:
        return lambda hidden: hidden

    @torch.no_grad()
    def normed(hidden: torch.Tensor) -> torch.Tensor:
        weight = next(norms[-1].parameters(), hidden)
        result: torch.Tensor = norms[-1](hidden.to(weight.device, weight.dtype))
        return result.float().cpu()

    return normed
