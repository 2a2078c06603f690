"""Trials at server start: which faster ways of computing give the same outputs as the blocks' own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from swarm_models.gpu.fp8_weight import Fp8Weight, Fp8WithExactInputs
from swarm_models.kernels.attention import AttentionKernel, attention_kernel
from swarm_models.kernels.quantized_linear import QuantizedLinear, QuantizedWeight, swapped_weights
from swarm_models.quantization.split_linear import SplitLinear
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import IN_WINDOWS, BlockInput
from swarm_server.blocks.blocks import BlockStack
from swarm_server.blocks.split_stack import Stack
from swarm_server.engine.session_state import Session, SessionStep
from swarm_server.gpu.cuda_recorder import CudaRecorder
from swarm_server.gpu.step_replays import StepReplays
from swarm_server.gpu.trial import attention_is_right
from swarm_server.graph.step_graph import StepGraphs
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.kv_layout import StackLayout
from swarm_server.kv.rows_cache import replaceable

if TYPE_CHECKING:
    from swarm_server.engine.engine import Engine
    from swarm_server.gpu.triton_attention import TritonAttention

T = TypeVar("T")

_SAME = 5e-3  # relative; rounding in int8 amplifies differences of 1e-7, real errors are of order 1
_SAME_IN_HALF = 5e-2  # for 16-bit floats: neighbouring values differ by about 4e-3


@dataclass(frozen=True)
class Ways:
    """A choice of how batches are computed.

    Attributes:
        in_place: whether attention reads keys and values where they are stored, not from a copy.
        attention: the kernel that attends for one new position; None for transformers' own function.
        graphs: decode steps as CPU programs or GPU graphs; None if the blocks' own code computes decode steps.
        refusal: why there are no graphs.
    """

    in_place: bool = False
    attention: AttentionKernel | None = None
    graphs: StepGraphs | StepReplays | None = None
    refusal: str = ""


def fastest_ways(stack: Stack, layout: StackLayout, try_rows: Callable[[Ways], torch.Tensor]) -> Ways:
    """Return the fastest ways whose trial gives the same outputs as the blocks' own code.

    ``try_rows``: computes ``steps_of_two_lengths`` in the given ways.
    """
    views = stack.views(stack.span)
    if layout.has_index or not all(replaceable(view.config) for view in views):
        return Ways(refusal="attention cannot be taken over")
    types = {view.device.type for view in views}
    if not layout.in_int8:  # a copy of keys and values in int8 would be larger than they are, on any device
        if types == {"cuda"}:
            return _with_replays(stack, layout, try_rows)
        if types != {"cpu"}:  # fast memory, but slow calls: one copy takes less time than attention in many places
            return Ways(refusal="blocks are not on the CPU, nor on a GPU with CUDA")
    in_place = _tried(lambda: _in_place(stack, layout, try_rows), lambda error: None)
    if in_place is None:
        return Ways(refusal="attention cannot read keys and values in place")
    ways, expected = in_place
    return _with_graphs(ways, stack, layout, lambda tried: same(try_rows(tried), expected))


def _tried(trial: Callable[[], T], on_error: Callable[[Exception], T]) -> T:
    """Return the trial's result, or ``on_error(error)`` if the trial fails, which means that its way does not fit."""
    try:
        return trial()
    except Exception as error:  # a model family's code or a driver may raise any error
        return on_error(error)


def _in_place(
    stack: Stack, layout: StackLayout, try_rows: Callable[[Ways], torch.Tensor]
) -> tuple[Ways, torch.Tensor] | None:
    """Return ways that read keys and values in place, and the outputs of the blocks' own code; None if they differ."""
    tolerance = _tolerance(stack) if layout.in_int8 else _SAME
    # Rounding inputs to FP8 would make much of small differences, so that no comparison could find mistakes.
    with swapped_weights(_fp8_layers(stack), _with_exact_inputs):
        expected = try_rows(Ways())
        for attention in (None,) if layout.in_int8 else (attention_kernel(), None):  # the kernel reads float32
            ways = Ways(in_place=True, attention=attention)
            if same(try_rows(ways), expected, tolerance):
                return ways, expected
    return None


def _with_graphs(ways: Ways, stack: Stack, layout: StackLayout, is_right: Callable[[Ways], bool]) -> Ways:
    refusal = _need_their_own_code(stack, layout)
    if refusal is None and ways.attention is None:
        refusal = "attention is not the kernel's"
    if refusal is not None:
        return replace(ways, refusal=refusal)
    if not isinstance(stack, BlockStack):
        return replace(ways, refusal="blocks are on several devices")
    graphs = StepGraphs(stack, _longest_window(layout))
    if graphs.refusal is not None:
        return replace(ways, refusal=graphs.refusal)
    tried = replace(ways, graphs=graphs)
    return tried if is_right(tried) else replace(ways, refusal="a program gives other outputs than the blocks")


def _with_replays(stack: Stack, layout: StackLayout, try_rows: Callable[[Ways], torch.Tensor]) -> Ways:
    try:
        from swarm_server.gpu.triton_attention import TritonAttention
    except ImportError as error:
        return Ways(refusal=f"Triton cannot be imported: {error}")
    return with_replays(stack, layout, try_rows, TritonAttention(), CudaRecorder())


def with_replays(
    stack: Stack,
    layout: StackLayout,
    try_rows: Callable[[Ways], torch.Tensor],
    attention: TritonAttention,
    recorder: CudaRecorder,
) -> Ways:
    """Return ways with graphs for blocks on GPUs, if their trial gives the outputs of the blocks' own code."""
    refusal = _need_their_own_code(stack, layout)
    if refusal is not None:
        return Ways(refusal=refusal)

    def trial() -> Ways:
        for device in set(stack.devices):
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                if not attention_is_right(attention, device, stack.dtype):
                    return Ways(refusal=f"the attention kernel gives other outputs than torch on {device}")
        in_fp8 = _fp8_layers(stack)
        with swapped_weights(in_fp8, _with_exact_inputs):
            replays = StepReplays(stack, _longest_window(layout), attention, recorder)
            outputs, expected = try_rows(Ways(graphs=replays)), try_rows(Ways())
        if replays.refusal is None and not same(outputs, expected, _tolerance(stack)):
            return Ways(refusal="a graph gives other outputs than the blocks")
        if in_fp8 and replays.refusal is None:  # these graphs multiply by the weights of the trial
            replays = StepReplays(stack, _longest_window(layout), attention, recorder)
            try_rows(Ways(graphs=replays))
        return Ways(graphs=replays) if replays.refusal is None else Ways(refusal=replays.refusal)

    return _tried(trial, lambda error: Ways(refusal=f"a trial of graphs fails: {error}"))


def _tolerance(stack: Stack) -> float:
    """Return how far outputs of the blocks may be apart, relative to the largest, if they differ by rounding alone."""
    return _SAME if stack.dtype.itemsize > 2 else _SAME_IN_HALF


def _fp8_layers(stack: Stack) -> list[QuantizedLinear]:
    layers = (module for module in stack.modules() if isinstance(module, QuantizedLinear))
    return [layer for layer in layers if isinstance(layer.quantized, Fp8Weight)]


def _with_exact_inputs(weight: QuantizedWeight) -> QuantizedWeight:
    assert isinstance(weight, Fp8Weight)
    return Fp8WithExactInputs(weight)


def _need_their_own_code(stack: Stack, layout: StackLayout) -> str | None:
    """Return why steps of these blocks cannot become graphs; None if they can be tried."""
    if layout.has_states or layout.has_index:
        return "blocks remember more than keys and values"
    if layout.in_int8:
        return "keys and values are in int8"
    if not stack.row_independent:
        return "the output of a row depends on the other rows"
    if any(isinstance(module, SplitLinear) for module in stack.modules()):
        return "the rows of linear layers are on several devices"
    return None


def _longest_window(layout: StackLayout) -> int:
    return max(block.window or 0 for block in layout.blocks)


def same(outputs: torch.Tensor, expected: torch.Tensor, tolerance: float = _SAME) -> bool:
    """Return whether outputs differ by no more than rounding."""
    return bool((outputs - expected).abs().max() <= tolerance * expected.abs().max())


def can_join(engine: Engine) -> bool:
    """Return whether the blocks let a position attend to a later one where ``BlockInput.joined`` says so."""
    if engine.layout.has_states or engine.layout.has_index:
        return False
    hidden = torch.randn(1, 2, engine.hidden_size, generator=torch.Generator().manual_seed(0))
    joined = torch.tensor([[[IN_WINDOWS, 0]], [[0, 0]]], dtype=torch.uint8)

    def makes_a_difference() -> bool:
        seeing, alone = (
            engine.stateless.forward(engine.layout.hosted, BlockInput(hidden, joined=each))[:, 0] for each in joined
        )
        return not same(seeing, alone)

    return _tried(makes_a_difference, lambda error: False)


def opened(engine: Engine, blocks: Span, reserved: int = 0) -> Session:
    """Return a session of one row for a trial or a measurement, whose memory is not limited."""
    return engine.open(blocks, 1, CacheBudget(2**62, 1).lease(""), reserved=reserved, shares=False)


def outputs_of(engine: Engine, batch: Sequence[tuple[Session, SessionStep]]) -> list[torch.Tensor]:
    """Return the outputs of the steps, or raise the error of one."""
    outputs = []
    for output in engine.run(batch):
        if isinstance(output, Exception):
            raise output
        assert isinstance(output, torch.Tensor)
        outputs.append(output)
    return outputs


def steps_of_two_lengths(engine: Engine) -> torch.Tensor:
    """Return the outputs of two prompts (one if rows cannot mix), then of a step of each, [positions, hidden_size]."""
    generator = torch.Generator().manual_seed(0)
    sessions, outputs = [], []
    for length in (3, 1) if engine.mixes_rows else (3,):
        sessions.append(opened(engine, engine.layout.hosted))
        outputs += _stepped(engine, sessions[-1:], length, generator)
    outputs += _stepped(engine, sessions, 1, generator)
    return torch.cat([output.flatten(0, 1) for output in outputs])


def _stepped(engine: Engine, sessions: list[Session], num_new: int, generator: torch.Generator) -> list[torch.Tensor]:
    batch = []
    for session in sessions:
        hidden = torch.randn(1, num_new, engine.hidden_size, generator=generator)
        batch.append((session, SessionStep(session.length, BlockInput(hidden))))
    return outputs_of(engine, batch)
