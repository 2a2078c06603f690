"""Recorded forward passes: the outputs of plain ones, the gradients of recomputed ones, and memory that is counted."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.adapters.dropout import Dropout
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.blocks.blocks import load_blocks
from swarm_server.engine.engine import Engine
from tests.adapted import SALT, LocalModel
from tests.marks import always
from tests.unit.support import resident_bytes
from tests.zoo import BLOCKS, HIDDEN, save_checkpoint

HOSTED = Span(0, BLOCKS)
PLENTY = 1 << 30


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(name: str, directory: Path, quant: str = "none", **config) -> Engine:
    save_checkpoint(name, directory, **config)

    def transform(block: torch.nn.Module, _index: int) -> None:
        quantize_(block, quant, torch.device("cpu"), torch.float32)

    return Engine(load_blocks(ModelCheckpoint.open(directory), HOSTED, transform=transform))


@pytest.mark.parametrize(
    ("family", "quant"), [("llama", "int8"), ("gpt2", "int8"), ("gemma3_text", "none"), ("mixtral", "int8")]
)
def test_any_block_can_be_recorded(family, quant, tmp_path):
    engine = load(family, tmp_path, quant)
    hidden, grad, mask = random(3, 7, HIDDEN), random(3, 7, HIDDEN, seed=1), torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = 0
    output, recorded = engine.stateless.record(HOSTED, BlockInput(hidden.clone(), mask), max_bytes=PLENTY)
    assert not output.requires_grad
    attended = mask.bool()
    expected = engine.stateless.forward(HOSTED, BlockInput(hidden, mask))[attended]
    assert (output[attended] - expected).abs().max() <= 1e-5 * expected.abs().max()
    grad[~attended] = 0
    assert torch.equal(recorded.backward(grad)[0], engine.stateless.backward(HOSTED, BlockInput(hidden, mask), grad)[0])


def adapted(directory: Path) -> tuple[Engine, PlacedAdapter]:
    engine = load("llama", directory)
    local = LocalModel.load(directory, r=4, target_modules=["q_proj", "down_proj"])
    return engine, engine.place(b"key", local.adapter(HOSTED, SALT, dropout=0.3))


def test_gradients_of_an_adapter(tmp_path):
    engine, adapter = adapted(tmp_path)
    hidden, grad, dropout = random(3, 7, HIDDEN), random(3, 7, HIDDEN, seed=1), Dropout(7)
    expected = engine.stateless.backward(
        HOSTED, BlockInput(hidden.clone()), grad, adapter, dropout, trains_adapter=True
    )
    _, recorded = engine.stateless.record(
        HOSTED, BlockInput(hidden), adapter, dropout, trains_adapter=True, max_bytes=PLENTY
    )
    engine.stateless.forward(HOSTED, BlockInput(random(2, 5, HIDDEN)))  # without the adapter, meanwhile
    found = recorded.backward(grad)
    assert len(found) == 1 + 2 * 2 * BLOCKS and all(map(torch.equal, found, expected))


def test_no_more_is_kept_than_there_is_room_for(tmp_path):
    engine, adapter = adapted(tmp_path)
    hidden = random(3, 7, HIDDEN)

    def record(max_bytes: int):
        return engine.stateless.record(
            HOSTED, BlockInput(hidden.clone()), adapter, trains_adapter=True, max_bytes=max_bytes
        )

    output, recorded = record(PLENTY)
    assert record(recorded.size_bytes)[1].size_bytes == recorded.size_bytes
    for max_bytes in (recorded.size_bytes - 1, recorded.size_bytes // 2, 0):
        same, nothing = record(max_bytes)
        assert torch.equal(same, output) and nothing is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quant", always("int8", among=["none", "int8"]))
def test_what_is_counted_is_what_memory_it_takes(quant, tmp_path):
    engine = load("llama", tmp_path, quant, intermediate_size=2048)
    hidden = random(4, 200, HIDDEN)
    engine.stateless.record(HOSTED, BlockInput(hidden.clone()), max_bytes=PLENTY)
    gc.collect()
    before, passes = resident_bytes(), []
    for _ in range(4):
        passes.append(engine.stateless.record(HOSTED, BlockInput(hidden.clone()), max_bytes=PLENTY)[1])
    counted = sum(recorded.size_bytes for recorded in passes)
    assert counted > 50e6
    assert abs(resident_bytes() - before - counted) < 0.1 * counted
    passes.clear()
    assert abs(resident_bytes() - before) < 0.2 * counted  # nothing holds on to itself: a pass is a quarter of it
