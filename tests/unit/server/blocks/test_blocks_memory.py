"""Loading with quantization never needs much more memory than the quantized blocks and one block in fp32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.marks import SLOW
from tests.published import fp8_blocks, fp8_config, publish
from tests.zoo import save_checkpoint

BLOCK = (128, 128)
MIB = 2**20
NUM_BLOCKS = 5
SLACK_BYTES = 8 * MIB  # Python objects, buffers of file reads

# Prints, in bytes: growth of the peak of resident memory, size of the loaded blocks, size of the largest block in fp32.
# Nothing is mapped from the checkpoint's files, so resident memory is the process's own apart from libraries, which a
# first small load has brought in. Warming up also makes the peak so far that of the imports: memory freed since then is
# taken up again before the peak grows, so it is written over and held.
SCRIPT = """
import gc, resource, sys
import torch
from torch import nn
from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_protocol.span import Span
from swarm_server.blocks.blocks import load_blocks

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

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large = (Checkpoint.open(path) for path in sys.argv[1:])
torch.set_num_threads(1)
load_blocks(small, Span(0, 1), transform=narrow)
blocks = large.family.all_blocks
gc.collect()
filler = torch.ones(max(0, peak() - resident()) // 4)
before = resident()
stack = load_blocks(large, blocks, transform=narrow)
held = sum(t.nbytes for t in [*stack.blocks.parameters(), *stack.blocks.buffers()])
print(peak() - before, held, 4 * max(large.family.block_parameters))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("llama", torch.float8_e4m3fn, marks=SLOW),
        pytest.param("mixtral", torch.bfloat16, marks=SLOW),
    ],
)
def test_peak_while_loading(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {
        "llama": dict(hidden_size=512, intermediate_size=2304),
        "mixtral": dict(hidden_size=512, intermediate_size=768),
    }
    for directory, options in (
        ("small", {"num_hidden_layers": 1}),
        ("large", {"num_hidden_layers": NUM_BLOCKS, **sizes[name]}),
    ):
        if dtype == torch.float8_e4m3fn:
            publish(
                tmp_path / directory, fp8_config(BLOCK), lambda weight: fp8_blocks(weight, BLOCK), name=name, **options
            )
        else:
            save_checkpoint(name, tmp_path / directory, dtype=dtype, max_shard_size="50MB", **options)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "small", tmp_path / "large"],
        capture_output=True,
        text=True,
        check=True,
    )
    growth_bytes, held_bytes, block_bytes = map(int, result.stdout.split())
    assert block_bytes > 1.9 * SLACK_BYTES
    assert held_bytes < block_bytes * NUM_BLOCKS / 3.9
    assert growth_bytes > held_bytes  # the measure is sound
    assert growth_bytes < held_bytes + block_bytes + SLACK_BYTES, (
        f"peak grew by {growth_bytes / MIB:.0f} MiB; the blocks take {held_bytes / MIB:.0f} MiB, "
        f"one in fp32 {block_bytes / MIB:.0f} MiB"
    )
