"""Rotary-embedding settings of a GGUF file that transformers ignores; without them, text would be silently wrong."""

from __future__ import annotations

from math import pi
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from swarm_models.checkpoints.gguf.header import TYPES, GgufHeader
from swarm_protocol.errors import UnsupportedModel

FACTORS = "rope_freqs.weight"  # llama.cpp divides frequencies by these: [head_dim / 2] fp32
OTHER_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
# llama.cpp's converter writes the factors alone. These settings are the same in all models of Llama 3.1 to 3.3.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def missing_rope(config: PreTrainedConfig, header: GgufHeader, path: Path) -> dict[str, Any]:
    """Return what ``config`` lacks: the rope scaling of Llama 3.1 and later, or nothing.

    Raises:
        UnsupportedModel: the file scales rotary embeddings in another way, which the config does not have.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return {}
    _require_no_other_scaling(header, path)
    stored = header.tensors.get(FACTORS)
    if stored is None:
        return {}
    if "rope_theta" not in rope or not stored.shape or 0 in stored.shape:
        raise UnsupportedModel(f"{path} holds {FACTORS}, which does not fit a model of type {config.model_type!r}")
    if TYPES[stored.type][0] != "F32":
        raise UnsupportedModel(f"{path} holds {FACTORS} as {TYPES[stored.type][0]}: expected F32")
    factors = stored.rows.read().view(torch.float32).flatten()
    scaling = {"factor": round(float(factors.max()), 3), **_LLAMA3}  # the lowest frequencies get the whole factor
    expected = _llama3_factors(len(factors), float(rope["rope_theta"]), **scaling)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModel(f"{path} scales rotary embeddings by factors of its own: expected those of Llama 3.1")
    return {"rope_parameters": {**rope, "rope_type": "llama3", **scaling}}


def _require_no_other_scaling(header: GgufHeader, path: Path) -> None:
    """Raise UnsupportedModel if the file scales rotary embeddings by a number, or by other factors than ``FACTORS``."""
    prefix = f"{header.architecture}.rope"
    kind = header.values.get(f"{prefix}.scaling.type", "linear")  # llama.cpp's default
    factor = header.values.get(f"{prefix}.scaling.factor", header.values.get(f"{prefix}.scale_linear", 1.0))
    is_scaled = kind != "none" and factor not in (0.0, 1.0)
    if is_scaled or any(name in header.tensors for name in OTHER_FACTORS):
        raise UnsupportedModel(f"{path} scales rotary embeddings ({kind}), which transformers does not read")


def _llama3_factors(
    count: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> torch.Tensor:
    """Return [count] fp32, the divisors that ``_compute_llama3_parameters`` of transformers applies to frequencies."""
    wavelengths = 2 * pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    smooth = (original_max_position_embeddings / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()
