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

        is_quantised = True

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> None:
            options = {"has_fp16_weights": False, "threshold": OUTLIER_THRESHOLD, "device": "meta"}
            super().__init__(*_in_out(weight), bias=False, **options)
            # not left to Int8Params.to(), which quantises only on the way from the CPU
            quantise = _bitsandbytes().functional.int8_vectorwise_quant
            q, scale, _ = quantise(weight.detach().to(device, torch.float16).contiguous())
            parameter = _bitsandbytes().nn.Int8Params
            self.weight = parameter(q, requires_grad=False, has_fp16_weights=False, CB=q, SCB=scale)
            self.bias = _frozen(bias, device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                count_saved(x)  # kept as an attribute of the graph's node
            return super().forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    return Linear8bitRows


@functools.cache
def _linear_4bit() -> Any:
    class LinearNF4Frozen(_bitsandbytes().nn.Linear4bit):  # type: ignore[misc]
        """A layer whose weight is quantised at once, and whose products have gradients on every processor."""

        is_quantised = True

        def __init__(
            self, weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, compute_dtype: torch.dtype
        ) -> None:
            options = {"compute_dtype": compute_dtype, "quant_type": "nf4", "device": "meta"}
            super().__init__(*_in_out(weight), bias=False, **options)
            # On CPUs with bfloat16 instructions, the layer would repack its weight at the first product. Repacking
            # fails for widths that are no multiple of 64, and makes gradients impossible.
            self.support_avx512bf16_for_cpu = False
            parameter = _bitsandbytes().nn.Params4bit
            self.weight = parameter(weight.detach(), requires_grad=False, quant_type="nf4", module=self)
            self.to(device)  # quantises
            self.bias = _frozen(bias, device)

    return LinearNF4Frozen


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> tuple[torch.nn.Module, int]:
    """Return an LLM.int8() layer on ``device`` from weight [out, in] and bias [out], and the bytes of its weight.

    Columns of outliers are found over the whole batch, so a row's result depends slightly on the other rows.
    """
    layer = _linear_8bit()(weight, bias, device).eval()
    return layer, layer.weight.CB.nbytes + layer.weight.SCB.nbytes


def nf4_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device, compute_dtype: torch.dtype
) -> tuple[torch.nn.Module, int]:
    """Return a 4-bit NormalFloat layer on ``device``, and the bytes of its weight.

    weight: [out, in], bias: [out]. The scales are doubly quantised (QLoRA, https://arxiv.org/abs/2305.14314). The
    weight is expanded to ``compute_dtype`` for each product.
    """
    layer = _linear_4bit()(weight, bias, device, compute_dtype).eval()
    state = layer.weight.quant_state
    return layer, layer.weight.data.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes


def _in_out(weight: torch.Tensor) -> tuple[int, int]:
    out_features, in_features = weight.shape
    return in_features, out_features


def _frozen(bias: torch.Tensor | None, device: torch.device) -> torch.nn.Parameter | None:
    return None if bias is None else torch.nn.Parameter(bias.detach().to(device, copy=True), requires_grad=False)
