"""Values that the benchmark of quality takes for those of K-quants: few in a group, and nearer with more bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")  # the extra of that name
sys.path.insert(0, str(Path(__file__).parents[5] / "benchmarks"))

from k_quants import ROUND

MOST_ERROR = {  # of weights that are drawn from a normal distribution
    "Q2_K": 0.32,
    "Q3_K": 0.17,
    "Q4_K": 0.08,
    "Q5_K": 0.04,
    "Q6_K": 0.02,
    "IQ4_NL": 0.09,
    "IQ4_XS": 0.09,
}


@pytest.mark.parametrize("kind", ROUND)
def test_values_are_near_and_few(kind: str) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    weight[0, :256] = 0
    found = ROUND[kind](weight)
    assert found.isfinite().all() and not found[0, :256].any()
    assert (found - weight).norm() < MOST_ERROR[kind] * weight.norm()
    options = ROUND[kind].keywords
    num_levels = len(options["levels"]) if "levels" in options else options["top"] + 1
    assert all(len(group.unique()) <= num_levels for group in found.reshape(-1, options["group"]))
