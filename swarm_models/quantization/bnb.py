"""Linear layers of bitsandbytes, built from a weight without an unquantised copy on the device.

bitsandbytes takes seconds to import, so it is imported when the first layer is built.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from swarm_models.activation_limit import count_saved

OUTLIER_THRESHOLD = 6.0  # LLM.int8(), https://arxiv.org/abs/2208.07339, section 3.2


@functools.cache
def _bitsandbytes() -> Any:
    """Return the package, without its warning at every product that is not computed in fp16."""
    import bitsandbytes

    logging.getLogger("bitsandbytes.autograd._functions").addFilter(
        lambda record: "inputs will be cast from" not in str(record.msg)
    )
    return bitsandbytes


@functools.cache
def _linear_8bit() -> Any:
    class Linear8bitRows(_bitsandbytes().nn.Linear8bitLt):  # type: ignore[misc]
        """A layer for inputs of any leading shape; the original fails above three dimensions, which DeepSeek has."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                count_saved(x)  # kept as an attribute of the graph's node
            return super().forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    return Linear8bitRows


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> tuple[torch.nn.Module, int]:
    """Return an LLM.int8() layer on ``device`` from weight [out, in] and bias [out], and the bytes of its weight.

    Columns of outliers are found over the whole batch, so a row's result depends slightly on the other rows.
    """
    layer = _linear_8bit()(
        *_in_out(weight), bias=False, has_fp16_weights=False, threshold=OUTLIER_THRESHOLD, device="meta"
    )
    # not left to Int8Params.to(), which quantises only on the way from the CPU
    quantise = _bitsandbytes().functional.int8_vectorwise_quant
    q, scale, _ = quantise(weight.detach().to(device, torch.float16).contiguous())
    layer.weight = _bitsandbytes().nn.Int8Params(q, requires_grad=False, has_fp16_weights=False, CB=q, SCB=scale)
    layer.bias = _frozen(bias, device)
    return layer.eval(), q.nbytes + scale.nbytes


def nf4_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, compute_dtype: torch.dtype
) -> tuple[torch.nn.Module, int]:
    """Return a 4-bit NormalFloat layer on ``device``, and the bytes of its weight.

    weight: [out, in], bias: [out]. The scales are doubly quantised (QLoRA, https://arxiv.org/abs/2305.14314). The
    weight is expanded to ``compute_dtype`` for each product.
    """
    nn = _bitsandbytes().nn
    layer = nn.Linear4bit(*_in_out(weight), bias=False, compute_dtype=compute_dtype, quant_type="nf4", device="meta")
    # On CPUs with bfloat16 instructions, the layer would repack its weight at the first product. Repacking fails for
    # widths that are no multiple of 64, and makes gradients impossible.
    layer.support_avx512bf16_for_cpu = False
    layer.weight = nn.Params4bit(weight.detach(), requires_grad=False, quant_type="nf4", module=layer)
    layer.to(device)  # quantises
    layer.bias = _frozen(bias, device)
    state = layer.weight.quant_state
    return layer.eval(), layer.weight.data.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes


def _in_out(weight: torch.Tensor) -> tuple[int, int]:
    out_features, in_features = weight.shape
    return in_features, out_features


def _frozen(bias: torch.Tensor | None, device: torch.device) -> torch.nn.Parameter | None:
    return None if bias is None else torch.nn.Parameter(bias.detach().to(device, copy=True), requires_grad=False)
