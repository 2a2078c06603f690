"""What the forward and backward passes of one block cost, in this process, with one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import QUANT_NAMES
from torch import nn

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.blocks.dense_linear import use_onednn_
from swarm_server.blocks.recording import Recorded
from swarm_server.engine.engine import Engine

TOKENS = 64
RANK, TARGETS = 8, ("q_proj", "v_proj")
_BLOCKS, _ROUNDS = 4, 5
_TRANSPOSING = (("", False), (", transposed weights", True))


@dataclass(frozen=True)
class PassCost:
    """Milliseconds per block for one row of TOKENS tokens, one thread."""

    what: str
    forward: float
    recorded: float  # forward that keeps its activations
    back: float  # through what was kept
    recomputed: float  # backward that computes the forward again
    kept_mb: float  # activations per block


def pass_costs(path: Path, quant: str) -> Iterator[PassCost]:
    """Of an engine in this process, with transposed weights where these can be kept, and with LoRA."""
    span = Span(0, _BLOCKS)

    def prepare(block: nn.Module, _index: int) -> None:
        quantize_(block, quant, torch.device("cpu"), torch.float32)
        use_onednn_(block)

    stack = load_blocks(ModelCheckpoint.open(path), span, transform=prepare)
    engine = Engine(stack)
    hidden, grad = torch.randn(2, 1, TOKENS, engine.hidden_size)
    adapter = engine.place(bytes(32), Adapter(bytes(16), tuple(low_rank(stack, span))))
    transposable = any(weight.transpose_bytes for weight in engine.int8_weights)
    kinds: list[tuple[str, bool, PlacedAdapter | None]] = [("", False, None), (", LoRA", False, adapter)]
    if transposable:
        kinds = [(what + more, kept, added) for what, _, added in kinds for more, kept in _TRANSPOSING]
    costs: dict[str, list[float]] = {}
    for _ in range(_ROUNDS):  # A B A B
        for what, transposed, added in kinds:
            for weight in engine.int8_weights:
                weight.keep_transpose(transposed)
            run_passes(engine, span, BlockInput(hidden), grad, added)  # warm
            found = run_passes(engine, span, BlockInput(hidden), grad, added)
            for column, cost in enumerate(found):
                costs.setdefault(f"{what} {column}", []).append(cost / len(span))
    for what, _, _ in kinds:
        columns = [statistics.median(costs[f"{what} {column}"]) for column in range(5)]
        yield PassCost(QUANT_NAMES[quant] + what, *columns)


def run_passes(
    engine: Engine, span: Span, inputs: BlockInput, grad: torch.Tensor, adapter: PlacedAdapter | None
) -> tuple[float, float, float, float, float]:
    """The columns of ``PassCost`` over all blocks of the span."""
    passes, trains = engine.stateless, adapter is not None
    kept: list[Recorded] = []

    def new() -> BlockInput:
        return replace(inputs, hidden=inputs.hidden.clone())

    def keep() -> None:
        _, recorded = passes.record(span, new(), adapter, trains_adapter=trains, max_bytes=1 << 40)
        assert recorded is not None
        kept.append(recorded)

    forward, keeping = milliseconds(lambda: passes.forward(span, new(), adapter)), milliseconds(keep)
    kept_mb = kept[0].size_bytes / 1e6
    back = milliseconds(lambda: kept.pop().backward(grad))
    recomputed = milliseconds(lambda: passes.backward(span, new(), grad, adapter, trains_adapter=trains))
    return forward, keeping, back, recomputed, kept_mb


def low_rank(stack: BlockStack, span: Span) -> Iterator[LowRank]:
    for block in span:
        for module in TARGETS:
            linear: Any = stack.original(block).get_submodule(f"self_attn.{module}")
            a, b = torch.randn(RANK, linear.in_features), torch.randn(linear.out_features, RANK)
            yield LowRank(block, f"self_attn.{module}", 1.0, a / 100, b / 100)


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
