"""The GPTQ format: integers of 2, 4 or 8 bits with a scale and a zero point per group of inputs, in any order.

Layout: https://github.com/AutoGPTQ/AutoGPTQ, ``qlinear_cuda_old.py``. A word of weights holds consecutive inputs of one
output; a word of zero points holds consecutive outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from swarm_models.checkpoints.formats.groups import WORD_BITS, Integers, IntegerTensor, unpack_words
from swarm_models.checkpoints.formats.packed import PackedForm, Parts, require, require_groups, setting
from swarm_models.checkpoints.safetensors_file import StoredTensor


def forms(config: Mapping[str, Any]) -> tuple[PackedForm, ...]:
    bits = setting(config, "bits", (2, 4, 8))
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    version = setting({"checkpoint_format": version}, "checkpoint_format", ("gptq", "gptq_v2"))
    pack = partial(_pack, bits=bits, stored_minus_one=version == "gptq")
    parts = {"qweight": ".qweight", "qzeros": ".qzeros", "scales": ".scales"}
    return (PackedForm(parts, ".weight", pack, optional={"g_idx": ".g_idx"}),)


def _pack(name: str, parts: Parts, bits: int, stored_minus_one: bool) -> StoredTensor:
    """Combine words of n integers, qweight: [in / n, out] and qzeros: [groups, out / n], with scales: [groups, out].

    g_idx: [in], the group of each input; without it, groups are consecutive.
    ``stored_minus_one``: zero points are stored less one, as in the first version of the format.
    """
    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    per_word = WORD_BITS // bits
    is_right = qweight.dtype == torch.int32 and len(qweight.shape) == 2
    require(is_right, qweight, "a matrix of int32")
    inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
    is_right = scales.dtype.is_floating_point and len(scales.shape) == 2 and scales.shape[1] == outputs
    require(is_right and scales.shape[0] > 0, scales, f"floats of shape [groups, {outputs}]")
    groups = scales.shape[0]
    words = (groups, -(-outputs // per_word))
    require(qzeros.dtype == torch.int32 and qzeros.shape == words, qzeros, f"int32 of shape {list(words)}")
    require_groups(parts, scales, inputs, groups)
    unpack = partial(_unpack, bits=bits, stored_minus_one=stored_minus_one)
    return IntegerTensor(name, torch.float32, (outputs, inputs), parts, unpack)


def _unpack(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    bits: int,
    stored_minus_one: bool,
) -> Integers:
    outputs = qweight.shape[1]
    q = unpack_words(qweight.T, bits)
    zeros = unpack_words(qzeros, bits)[:, :outputs]
    if stored_minus_one:
        zeros = (zeros + 1) & (1 << bits) - 1
    return Integers(q, scales.T, zeros.T, g_idx)
