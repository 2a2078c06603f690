"""The GPU's attention kernels: what Triton's interpreter makes of them, and that they compile for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from swarm_server.gpu.row_tables import FIELDS, PARTS
from tests.marks import NEEDS_TRITON
from tests.unit.server.gpu.attention_checks import check


@NEEDS_TRITON
def test_attention_is_that_of_sums_over_memory() -> None:
    """In a process of its own: Triton interprets everything or nothing."""
    command = [sys.executable, "-m", "tests.unit.server.gpu.attention_checks"]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"), [(32, 8, 128, 128), (3, 3, 20, 36), (8, 1, 256, 256)]
)
def test_attention_on_cuda(heads, kv_heads, width, value_width, dtype) -> None:
    from swarm_server.gpu.triton_attention import TritonAttention

    check(TritonAttention(), heads, kv_heads, width, value_width, dtype, "cuda")


@NEEDS_TRITON
@pytest.mark.parametrize("capability", [75, 80, 90])
@pytest.mark.parametrize(("dtype", "width"), [("fp32", 128), ("fp16", 64), ("bf16", 128), ("bf16", 256)])
def test_kernels_compile_for_gpus(capability: int, dtype: str, width: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from swarm_server.gpu import triton_attention

    if capability < 80 and dtype == "bf16":
        pytest.skip("that GPU has no bfloat16")
    kind = {"fp32": triton.language.float32, "fp16": triton.language.float16, "bf16": triton.language.bfloat16}[dtype]
    sides = {"GROUP": 4, "GROUP_SIDE": 16, "WIDTH": width, "SIDE": width, "VALUE_WIDTH": width, "VALUE_SIDE": width}
    others = {
        "HEADS": 8,
        "SHARES": 32,
        "PARTS": PARTS,
        "FIELDS": FIELDS,
        "BLOCK": 64 if width <= 128 and dtype != "fp32" else 32,
        "IS_ALIGNED": True,
    }
    for kernel in (triton_attention._store, triton_attention._attend_share, triton_attention._join):
        constants = {
            name: value for name, value in (sides | others | {"TYPE": kind}).items() if name in kernel.arg_names
        }
        tensors = {
            "table": "*i64",
            "maxima": "*fp32",
            "totals": "*fp32",
            "parts": "*fp32",
            "scaling": "fp32",
        }
        signature = {name: tensors.get(name, f"*{dtype}") for name in kernel.arg_names if name not in constants}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"]
