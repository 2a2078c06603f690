"""Positions that attend to later ones: steps of sessions compute what one pass over everything computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swarm_protocol.wire.block_input import ACROSS_WINDOWS, IN_WINDOWS, BlockInput
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.blocks.blocks import BlockStack
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import SessionStep
from swarm_server.engine.ways import can_join
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.prefix_cache import PrefixCache
from tests.unit.server.engine.test_engine import HOSTED, PLENTY, TOLERANCE, Generation, run
from tests.unit.server.engine.test_engine_sharing import counted
from tests.zoo import HIDDEN, SLIDING

RUN = SLIDING + 3  # longer than a window
KINDS = pytest.mark.parametrize("kind", [IN_WINDOWS, ACROSS_WINDOWS])


@pytest.fixture
def engine(stack_of: Callable[[str], BlockStack]) -> Engine:
    return Engine(stack_of("gemma3_text"), prefix_cache=PrefixCache())


def joined(length: int, *runs: tuple[int, int], kind: int) -> torch.Tensor:
    """Runs of one row, each from a position to another, which it does not have any more."""
    result = torch.zeros(1, length, dtype=torch.uint8)
    for start, end in runs:
        result[:, start : end - 1] = kind
    return result


def with_runs(step: SessionStep, runs: torch.Tensor) -> SessionStep:
    return replace(step, inputs=replace(step.inputs, joined=runs))


def expected(engine: Engine, hidden: torch.Tensor, runs: torch.Tensor | None) -> torch.Tensor:
    return engine.stateless.forward(HOSTED, BlockInput(hidden, joined=runs))


def assert_same(found: torch.Tensor | Exception, wanted: torch.Tensor) -> None:
    if isinstance(found, Exception):
        raise found
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@KINDS
def test_in_one_batch_with_text(engine: Engine, kind: int) -> None:
    budget = CacheBudget(PLENTY, 1)
    seeing, reading = (Generation.open(engine, budget, seed=seed, padded=0) for seed in (1, 2))
    run(engine, (reading, reading.step(5)))
    outputs = {id(seeing): [], id(reading): []}
    parts = [joined(4, kind=kind), joined(RUN + 4, (1, RUN + 1), (RUN + 2, RUN + 4), kind=kind), joined(1, kind=kind)]
    for part in parts:
        num_new = part.shape[1]
        both = (seeing, with_runs(seeing.step(num_new), part)), (reading, reading.step(num_new))
        for generation, output in zip((seeing, reading), run(engine, *both), strict=True):
            outputs[id(generation)].append(output)
    wanted = expected(engine, seeing.hidden, torch.cat(parts, 1))
    assert_same(torch.cat(outputs[id(seeing)], 1), wanted)
    assert_same(torch.cat(outputs[id(reading)], 1), expected(engine, reading.hidden, None)[:, 5:])
    assert (wanted - expected(engine, seeing.hidden, None)).abs().max() > 0.01 * wanted.abs().max()


def test_windows_hide_parts_of_a_run_or_not(engine: Engine) -> None:
    hidden = torch.randn(1, RUN + 2, HIDDEN, generator=torch.Generator().manual_seed(3))
    one, other = (
        expected(engine, hidden, joined(RUN + 2, (0, RUN), kind=kind)) for kind in (IN_WINDOWS, ACROSS_WINDOWS)
    )
    assert (one - other).abs().max() > 0.01 * one.abs().max()


@KINDS
def test_sessions_share_what_comes_before_a_difference(
    engine: Engine, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's first positions depend on its last ones, so that it is shared whole: its content covers all of it."""
    budget, length = CacheBudget(PLENTY, 1), 4 * PAGE_TOKENS
    first, last = PAGE_TOKENS + 5, 2 * PAGE_TOKENS + 9
    runs = joined(length, (first, last), kind=kind)
    hidden = torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(4))
    other_picture, other_text = hidden.clone(), hidden.clone()
    other_picture[:, last - 1] += 1
    other_text[:, last + 1] += 1
    computed = counted(engine, monkeypatch)
    pages = []
    for number, content in enumerate((hidden, hidden, other_picture, other_text)):
        generation = Generation.open(engine, budget, seed=number)
        (output,) = run(engine, (generation, with_runs(generation.step(0, hidden=content, num_wanted=1), runs)))
        assert_same(output[:, -1:], expected(engine, content, runs)[:, -1:])
        pages.append(4 - computed[-1] // PAGE_TOKENS)
    # The text differs in the page in which the run ends; only runs within windows are continued from there.
    assert pages == [0, 3, 1, 2 if kind == IN_WINDOWS else 1]


def test_without_a_run_other_keys_are_remembered(engine: Engine) -> None:
    budget, length = CacheBudget(PLENTY, 1), 2 * PAGE_TOKENS
    hidden = torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(5))
    for seed, runs in enumerate([None, joined(length, (3, 9), kind=IN_WINDOWS), joined(length, (3, 9), kind=2), None]):
        generation = Generation.open(engine, budget, seed=seed)
        step = generation.step(0, hidden=hidden, num_wanted=1)
        (output,) = run(engine, (generation, step if runs is None else with_runs(step, runs)))
        assert_same(output[:, -1:], expected(engine, hidden, runs)[:, -1:])


@pytest.mark.parametrize(("name", "can"), [("gemma2", True), ("llama", True), ("lfm2", False), ("deepseek_v32", False)])
def test_which_blocks_let_positions_see_later_ones(name: str, can: bool, stack_of: Callable[[str], BlockStack]) -> None:
    assert can_join(Engine(stack_of(name))) is can
