"""Loading with quantization never needs much more memory than the quantized blocks and one block in fp32."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.gguf_files import write_gguf
from tests.marks import SLOW
from tests.published import fp8_blocks, fp8_config, publish
from tests.zoo import save_checkpoint

BLOCK = (128, 128)
MIB = 2**20
NUM_BLOCKS = 3
SLACK_BYTES = 8 * MIB  # Python objects, buffers of file reads

# Prints, in bytes: growth of the peak of resident memory, size of the loaded blocks, size of the largest block in fp32.
# Nothing is mapped from the checkpoint's files, so resident memory is the process's own apart from libraries, which a
# first small load has brought in. Warming up also makes the peak so far that of the imports: memory freed since then is
# taken up again before the peak grows, so it is written over and held.
SCRIPT = """
import gc, resource, sys
import torch
from torch import nn
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache

CPU = torch.device("cpu")
checkpoint, method = ModelCheckpoint.open(sys.argv[1]), sys.argv[2]

class Narrow(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight.data.to(torch.int8))

def narrow(block, index):
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Narrow(child.weight))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 3:  # fused experts
                delattr(module, name)
                setattr(module, name, Narrow(parameter))

def load(span):
    if method == "narrow":
        stack = load_blocks(checkpoint, span, transform=narrow)
        return stack, sum(t.nbytes for t in [*stack.blocks.parameters(), *stack.blocks.buffers()])
    layers = PackedLayers(WeightCache(0), method, CPU, torch.float32, checkpoint.family)
    made = []

    def transform(block, index):
        made.append(quantize_(block, method, CPU, torch.float32, eight_bits=layers.eight_bits(index)))

    stack = load_blocks(checkpoint, span, transform=transform, layers=layers)
    return stack, sum(report.quantised_bytes for report in [layers.report, *made])

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.set_num_threads(1)
load(Span(0, 1))
gc.collect()
filler = torch.ones(max(0, peak() - resident()) // 4)
before = resident()
stack, held = load(Span(1, checkpoint.family.num_blocks))
print(peak() - before, held, 4 * max(checkpoint.family.block_parameters))
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")


def measured(path: Path, method: str) -> Iterator[int]:
    """Load all blocks but the first in a process of its own, and return what it prints."""
    command = [sys.executable, "-c", SCRIPT, path, method]
    return map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [
        ("llama", torch.float32, 2304),
        pytest.param("llama", torch.float8_e4m3fn, 2304, marks=SLOW),
        pytest.param("mixtral", torch.bfloat16, 768, marks=SLOW),
    ],
)
def test_peak_while_loading(name: str, dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    sizes = dict(hidden_size=512, intermediate_size=width, num_hidden_layers=1 + NUM_BLOCKS)
    if dtype == torch.float8_e4m3fn:
        publish(tmp_path, fp8_config(BLOCK), partial(fp8_blocks, block=BLOCK), name=name, **sizes)
    else:
        save_checkpoint(name, tmp_path, dtype=dtype, max_shard_size="50MB", **sizes)
    growth_bytes, held_bytes, block_bytes = measured(tmp_path, "narrow")
    assert block_bytes > 1.9 * SLACK_BYTES
    assert held_bytes < block_bytes * NUM_BLOCKS / 3.9
    assert growth_bytes > held_bytes  # the measure is sound
    assert growth_bytes < held_bytes + block_bytes + SLACK_BYTES, (
        f"peak grew by {growth_bytes / MIB:.0f} MiB; the blocks take {held_bytes / MIB:.0f} MiB, "
        f"one in fp32 {block_bytes / MIB:.0f} MiB"
    )


LLAMA = dict(hidden_size=1024, intermediate_size=2816, num_attention_heads=16)


@SLOW
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("llama", LLAMA),
        (
            "qwen3_moe",
            dict(hidden_size=512, num_experts=16, moe_intermediate_size=512, decoder_sparse_step=1, mlp_only_layers=[]),
        ),
    ],
)
def test_blocks_in_fp8_are_packed_as_they_are_read(name: str, sizes: dict[str, object], tmp_path: Path) -> None:
    pack = partial(fp8_blocks, block=BLOCK)
    publish(tmp_path, fp8_config(BLOCK), pack, name=name, num_hidden_layers=3, **sizes)
    assert_packed_as_read(tmp_path, "int8")


@SLOW
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf")
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_blocks_of_a_gguf_file_are_packed_as_they_are_read(method: str, tmp_path: Path) -> None:
    """Query and key matrices too, whose rows are stored in another order: in fp32 they would be as large as a block."""
    write_gguf(tmp_path / "tiny.gguf", type="Q4_0", num_hidden_layers=3, num_key_value_heads=16, **LLAMA)
    assert_packed_as_read(tmp_path / "tiny.gguf", method)


def assert_packed_as_read(path: Path, method: str) -> None:
    """The peak is at most a fifth above what the blocks take. An fp32 matrix would be half a block or more."""
    growth_bytes, needed_bytes, _ = measured(path, method)
    # The system may take pages of libraries away meanwhile, which lessens the growth a little.
    assert 0.95 * needed_bytes < growth_bytes < 1.2 * needed_bytes
