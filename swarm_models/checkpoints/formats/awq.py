"""The AWQ format: 4-bit integers with a scale and a zero point per group of inputs (AutoAWQ's version "gemm").

Layout: https://github.com/casper-hansen/AutoAWQ, ``awq/utils/packing_utils.py``. Words hold eight consecutive outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.formats.groups import WORD_BITS, Integers, IntegerTensor, unpack_words
from swarm_models.checkpoints.formats.packed import PackedForm, Parts, require, setting
from swarm_models.checkpoints.safetensors_file import StoredTensor

_BITS = 4
_PER_WORD = WORD_BITS // _BITS
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each output in a word, which holds them in the order 0 2 4 6 1 3 5 7


def forms(config: Mapping[str, Any]) -> tuple[PackedForm, ...]:
    setting(config, "bits", (_BITS,), _BITS)
    version = config.get("version") or config.get("format") or "gemm"
    version = version.lower() if isinstance(version, str) else version
    setting({"version": version}, "version", ("gemm",))
    parts = {"qweight": ".qweight", "scales": ".scales"}
    return (PackedForm(parts, ".weight", _pack, optional={"qzeros": ".qzeros"}),)


def _pack(name: str, parts: Parts) -> StoredTensor:
    """Combine qweight: [in, out / 8] words, scales: [groups, out], and qzeros: [groups, out / 8], if any (else 8)."""
    qweight, scales = parts["qweight"], parts["scales"]
    require(qweight.dtype == torch.int32 and len(qweight.shape) == 2, qweight, "a matrix of int32")
    inputs, outputs = qweight.shape[0], qweight.shape[1] * _PER_WORD
    is_right = scales.dtype.is_floating_point and len(scales.shape) == 2 and scales.shape[1] == outputs
    require(is_right, scales, f"floats of shape [groups, {outputs}]")
    groups = scales.shape[0]
    require(groups > 0 and inputs % groups == 0, scales, f"a number of groups that divides {inputs} inputs")
    if "qzeros" in parts:
        qzeros, words = parts["qzeros"], (groups, qweight.shape[1])
        require(qzeros.dtype == torch.int32 and qzeros.shape == words, qzeros, f"int32 of shape {list(words)}")
    return IntegerTensor(name, torch.float32, (outputs, inputs), parts, partial(_unpack))


def _unpack(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor | None = None) -> Integers:
    q = unpack_words(qweight, _BITS, _PLACES).T
    zeros = 1 << _BITS - 1 if qzeros is None else unpack_words(qzeros, _BITS, _PLACES).T
    return Integers(q, scales.T, zeros)
