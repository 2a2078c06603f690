"""Finds out at the start which faster ways compute what the blocks' own code computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from swarm_protocol.kernels.attention import AttentionKernel, attention_kernel
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.blocks.blocks import BlockStack
from swarm_server.blocks.split_stack import Stack
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.graph.step_graph import StepGraphs
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.kv_layout import StackLayout
from swarm_server.kv.rows_cache import replaceable

if TYPE_CHECKING:
    from swarm_server.engine.engine import Engine

_SAME = 5e-3  # relative; rounding in int8 and bfloat16 amplifies differences of 1e-7, mistakes are of order 1


@dataclass(frozen=True)
class Ways:
    """How batches are computed.

    Attributes:
        in_place: attention looks at keys and values where they lie, not at a copy.
        attention: what attends for one new position, if not transformers' own function.
        graphs: decode steps as programs; None: the blocks' own code computes them.
        refusal: why there are no programs.
    """

    in_place: bool = False
    attention: AttentionKernel | None = None
    graphs: StepGraphs | None = None
    refusal: str = ""


def fastest_ways(stack: Stack, layout: StackLayout, try_rows: Callable[[Ways], torch.Tensor]) -> Ways:
    """The fastest of which a trial gives the same as the slowest.

    try_rows: what ``steps_of_two_lengths`` gives.
    """
    views = stack.views(stack.span)
    if any(view.device.type != "cpu" for view in views):  # memory is fast there, calls are slow: one copy is better
        return Ways(refusal="blocks are not on the CPU")
    if not all(replaceable(view.config) for view in views):
        return Ways(refusal="attention cannot be taken over")
    ways = Ways(in_place=True, attention=attention_kernel())
    try:
        expected = try_rows(Ways())
        if not _same(try_rows(ways), expected):
            ways = replace(ways, attention=None)
            if not _same(try_rows(ways), expected):
                return Ways(refusal="attention cannot look at keys and values in place")
    except Exception:  # a family's own code: whatever it raises means that this way does not fit
        return Ways(refusal="attention cannot look at keys and values in place")
    return _with_graphs(ways, stack, layout, lambda tried: _same(try_rows(tried), expected))


def _with_graphs(ways: Ways, stack: Stack, layout: StackLayout, is_right: Callable[[Ways], bool]) -> Ways:
    if ways.attention is None:
        return replace(ways, refusal="attention is not the kernel's")
    if layout.has_states:
        return replace(ways, refusal="blocks remember more than keys and values")
    if not stack.row_independent:
        return replace(ways, refusal="what a row gives depends on the other rows")
    if not isinstance(stack, BlockStack):
        return replace(ways, refusal="blocks are on several devices")
    graphs = StepGraphs(stack, max(block.window or 0 for block in layout.blocks))
    if graphs.refusal is not None:
        return replace(ways, refusal=graphs.refusal)
    tried = replace(ways, graphs=graphs)
    return tried if is_right(tried) else replace(ways, refusal="a program gives something else")


def _same(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((outputs - expected).abs().max() <= _SAME * expected.abs().max())


def steps_of_two_lengths(engine: Engine) -> torch.Tensor:
    """What two prompts give, and then a step of both; [positions, hidden_size]."""
    generator = torch.Generator().manual_seed(0)
    budget = CacheBudget(2**62, 1)
    sessions, outputs = [], []
    for length in (3, 1) if engine.mixes_rows else (3,):
        sessions.append(engine.open(engine.layout.hosted, 1, budget.lease(""), shares=False))
        outputs += _stepped(engine, sessions[-1:], length, generator)
    outputs += _stepped(engine, sessions, 1, generator)
    return torch.cat([output.flatten(0, 1) for output in outputs])


def _stepped(engine: Engine, sessions: list[Session], num_new: int, generator: torch.Generator) -> list[torch.Tensor]:
    batch = []
    for session in sessions:
        hidden = torch.randn(1, num_new, engine.hidden_size, generator=generator)
        batch.append((session, SessionStep(session.length, BlockInput(hidden))))
    outputs = []
    for output in engine.run(batch):
        if isinstance(output, Exception):
            raise output
        outputs.append(output)
    return outputs
