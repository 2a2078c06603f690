"""Families as pytest parameters: those whose blocks are made like another's are left to the slow tests."""

from __future__ import annotations

from tests.marks import always
from tests.zoo import ALIKE, SUPPORTED

UNLIKE = tuple(name for name in SUPPORTED if name not in ALIKE)
# They differ most: in what sessions keep, in experts, and in fused, transposed and biased matrices.
FEW = ("llama", "llama4_text", "mixtral", "gpt2", "gpt_oss", "bloom", "deepseek_v32", "lfm2", "qwen3_next", "mamba2")


def families(*but: str) -> list:
    """All but those named."""
    names = [name for name in SUPPORTED if name not in but]
    return always(*(name for name in names if name not in ALIKE), among=names)


FAMILIES = families()
OFTEN_FEW = always(*FEW, among=SUPPORTED)
