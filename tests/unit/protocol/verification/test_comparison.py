"""Two outputs of the same blocks: rounding stays below the bounds, lies do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarm_protocol.verification.comparison import Bounds, Comparison, RoundingKind

INT8, FP32, BF16 = RoundingKind("int8", "float32"), RoundingKind("none", "float32"), RoundingKind("none", "bfloat16")
INT4, NF4 = RoundingKind("int4", "float32"), RoundingKind("nf4", "float32")
FP8 = RoundingKind("fp8", "bfloat16", "cuda")
TOKENS, HIDDEN = 32, 256


def outputs(noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of a block, its outputs, and those of a server whose relative rounding error is ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    inputs, update, error = (torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(3))
    return inputs, inputs + update, inputs + update + noise * error


def excess(inputs: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, kinds=(FP32, INT8)) -> float:
    return Comparison.of(inputs, ours, theirs).excess(Bounds.of(*kinds, num_blocks=1, routed=False))


def test_the_statistics_are_those_of_their_formulas() -> None:
    inputs, ours, theirs = outputs(noise=0.02)
    comparison = Comparison.of(inputs, 1.01 * ours, ours)
    assert comparison.gain == pytest.approx(0.01, rel=1e-4)
    assert comparison.noise == pytest.approx(1.2533 * 0.01 / (TOKENS * HIDDEN) ** 0.5, rel=0.01)
    changed = torch.maximum((1.01 * ours - inputs).norm(dim=-1), (ours - inputs).norm(dim=-1))
    torch.testing.assert_close(comparison.errors, 0.01 * ours.norm(dim=-1) / changed, rtol=1e-3, atol=0)
    noisy = Comparison.of(inputs, ours, theirs)
    assert noisy.error == pytest.approx(0.02, rel=0.1)  # of the update, whose elements have variance 1
    # A coefficient over 256 elements is known to 0.02 / sqrt(2 * 256) or, by the update, twice the root of that.
    assert noisy.noise == pytest.approx(1.2533 * 0.02 / (TOKENS * HIDDEN) ** 0.5, rel=0.5)


@pytest.mark.parametrize("seed", range(30))
def test_rounding_is_no_lie(seed: int) -> None:
    assert excess(*outputs(0.015, seed)) < 0.7
    assert excess(*outputs(3e-4, seed), kinds=(INT8, INT8)) < 0.5


LIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "scaled": lambda _inputs, true: 1.01 * true,
    "zeros": lambda _inputs, true: torch.zeros_like(true),
    "input": lambda inputs, _true: inputs,
    "stale": lambda _inputs, true: true.roll(1, 0),
    "other": lambda inputs, true: inputs + (true - inputs).flip(1),
    "rare": lambda _inputs, true: torch.where((torch.arange(TOKENS) % 10 == 5)[:, None], 0.0, true),
    "noise": lambda inputs, true: true + 0.15 * (true - inputs).flip(1),
}


@pytest.mark.parametrize("kinds", [(FP32, INT8), (INT8, BF16), (INT8, INT8), (FP32, FP32)])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(lie: str, kinds: tuple[RoundingKind, RoundingKind]) -> None:
    inputs, ours, theirs = outputs(3e-4 if kinds[0] == kinds[1] else 0.015)
    assert excess(inputs, LIES[lie](inputs, ours), theirs, kinds) > 1
    assert excess(inputs, ours, LIES[lie](inputs, theirs), kinds) > 1


def test_a_router_near_a_tie_is_no_lie() -> None:
    """One position goes to another expert; where servers round differently, it may be many."""
    inputs, ours, theirs = outputs(3e-4)
    theirs[7] = inputs[7] + (theirs - inputs)[7].flip(0)
    assert excess(inputs, ours, theirs, (INT8, INT8)) > 1
    alike = Bounds.of(INT8, INT8, num_blocks=1, routed=True)
    assert Comparison.of(inputs, ours, theirs).excess(alike) < 1
    theirs[:10] = inputs[:10] + (theirs - inputs)[:10].flip(1)
    bounds = Bounds.of(FP32, INT8, num_blocks=1, routed=True)
    assert Comparison.of(inputs, ours, theirs).excess(bounds) < 1


@pytest.mark.parametrize("kinds", [(INT4, INT8), (FP32, INT4), (NF4, INT4), (FP8, INT8), (FP8, FP8)])
@pytest.mark.parametrize("num_blocks", [1, 6, 40])
def test_gross_lies_are_found_beside_coarse_rounding(kinds: tuple[RoundingKind, RoundingKind], num_blocks: int) -> None:
    """Their rounding is no lie, though it comes to a third of what the blocks do."""
    bounds = Bounds.of(*kinds, num_blocks, routed=False)
    assert bounds.is_wide and bounds == Bounds.of(*reversed(kinds), num_blocks, routed=False)
    inputs, ours, theirs = outputs(noise=0.35)
    assert Comparison.of(inputs, ours, theirs).excess(bounds) < 0.8
    for lie in ("zeros", "input", "stale", "other"):
        assert Comparison.of(inputs, LIES[lie](inputs, ours), theirs).excess(bounds) > 1, lie
        assert Comparison.of(inputs, ours, LIES[lie](inputs, theirs)).excess(bounds) > 1, lie


def test_servers_of_the_same_coarse_rounding_are_held_to_what_others_are() -> None:
    for kind in (INT4, NF4):
        assert Bounds.of(kind, kind, 3, False) == Bounds.of(INT8, INT8, 3, False)


def test_keys_and_values_in_int8_are_no_lie_and_hide_none() -> None:
    """Their rounding is in sessions alone, so that a server with them differs from itself."""
    kv8, int4 = INT8._replace(quant="int8-kv8"), INT4._replace(quant="int4-kv8")
    for other in (kv8, INT8, FP32):
        assert excess(*outputs(0.015), kinds=(kv8, other)) < 0.7
        inputs, ours, theirs = outputs(0.015)
        assert excess(inputs, LIES["zeros"](inputs, ours), theirs, (kv8, other)) > 1
    assert Bounds.of(int4, INT8, 3, False) == Bounds.of(INT4, INT8, 3, False)
    assert Bounds.of(int4, INT4, 3, False) == Bounds.of(INT4, INT4._replace(device="cuda"), 3, False)


def test_nothing_computed_is_compared_too() -> None:
    zeros = torch.zeros(TOKENS, HIDDEN)
    assert excess(zeros, zeros, zeros) == 0
