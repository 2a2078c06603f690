"""Linear layers whose rows are on two devices give the bits of one device; each tensor is where it belongs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.gpu.int8_weight import GpuInt8Weight
from swarm_models.kernels.int8_linear import quantize_rows
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import linear_names
from swarm_models.quantization.split_linear import SplitLinear, split_linears_, split_rows
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.adapters.targets import linear_features
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.engine.engine import Engine
from tests.adapted import LocalModel
from tests.marks import SLOW
from tests.simulated_devices import FIRST, SECOND, SimulatedDevices
from tests.unit.server.session_outputs import session_outputs
from tests.zoo import save_checkpoint

SPAN = Span(0, 2)
SIZES = {
    "llama": dict(hidden_size=128, num_key_value_heads=4, intermediate_size=320),
    "mixtral": dict(hidden_size=128, num_key_value_heads=4, intermediate_size=192),
    "qwen2": dict(hidden_size=128, num_key_value_heads=4, intermediate_size=320),
}
FLOAT = torch.float32


def as_on_a_gpu(block: torch.nn.Module) -> None:
    """Make the linear layers what ``quantize_`` makes on CUDA, without its kernel."""
    for name in linear_names(block):
        linear = block.get_submodule(name)
        layer = QuantizedLinear(GpuInt8Weight(*quantize_rows(linear.weight)), linear.bias)
        layer.is_quantised = True
        block.set_submodule(name, layer)


def stack(directory: Path, quant: str, devices: tuple[torch.device, ...]) -> BlockStack:
    def transform(block: torch.nn.Module, _index: int) -> None:
        if quant == "int8":
            as_on_a_gpu(block)
        block.to(devices[0])
        if len(devices) > 1:
            split_linears_(block, devices, FLOAT)

    return load_blocks(ModelCheckpoint.open(directory), SPAN, device=devices[0], transform=transform)


def both(directory: Path, quant: str) -> list[Engine]:
    engines = [Engine(stack(directory, quant, devices)) for devices in ((FIRST,), (FIRST, SECOND))]
    for engine in engines:
        engine.ways = replace(engine.ways, graphs=None)
    return engines


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("llama", "int8"),
        ("qwen2", "none"),
        *(pytest.param(name, "none", marks=SLOW) for name in ("llama", "mixtral")),
        *(pytest.param(name, "int8", marks=SLOW) for name in ("qwen2", "mixtral")),
    ],
)
def test_outputs_are_those_of_one_device(family: str, quant: str, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path, **SIZES[family])
    with SimulatedDevices():
        alone, together = both(tmp_path, quant)
        split = [module for module in together._stack.modules() if isinstance(module, SplitLinear)]
        assert len(split) >= 4 * len(SPAN)
        for ours, theirs in zip(session_outputs(together, SPAN), session_outputs(alone, SPAN), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("quant", ["int8", "none"])
def test_passes_with_an_adapter_and_their_gradients_are_those_of_one_device(quant: str, tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, **SIZES["llama"])
    adapter = LocalModel.load(tmp_path, r=4, target_modules=["q_proj", "down_proj"]).adapter(SPAN)
    hidden, grad = torch.randn(2, 3, 128), torch.randn(2, 3, 128)

    def passed(engine: Engine) -> tuple[torch.Tensor, ...]:
        placed = engine.place(b"key", adapter)
        output = engine.stateless.forward(SPAN, BlockInput(hidden.clone()), placed)
        kept, recorded = engine.stateless.record(SPAN, BlockInput(hidden.clone()), placed, max_bytes=1 << 30)
        assert torch.equal(kept, output) and recorded is not None
        sizes.append(recorded.size_bytes)
        return output, *engine.stateless.backward(SPAN, BlockInput(hidden.clone()), grad, placed, trains_adapter=True)

    sizes: list[int] = []
    with SimulatedDevices():
        (expected_output, *expected), (output, *gradients) = map(passed, both(tmp_path, quant))
    assert torch.equal(output, expected_output)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()  # sums of two devices' parts
    assert sizes[1] < 1.5 * sizes[0]  # what is kept are activations, not weights


def test_rows_are_where_they_belong_and_small_layers_stay(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, hidden_size=128, num_key_value_heads=1, intermediate_size=320)
    with SimulatedDevices():
        block = stack(tmp_path, "none", (FIRST, SECOND)).original(0)
        up, key = block.get_submodule("mlp.up_proj"), block.get_submodule("self_attn.k_proj")
        assert [part.weight.device for part in up.parts] == [FIRST, SECOND]
        assert [len(part.weight) for part in up.parts] == [128, 192] and up.weight.shape == (320, 128)
        assert not isinstance(key, SplitLinear) and key.weight.device == FIRST
        assert Engine(stack(tmp_path, "int8", (FIRST, SECOND))).ways.graphs is None
    assert linear_features(block, "mlp.up_proj", 0) == (128, 320)
    with pytest.raises(
        RequestRejected, match=r"is a Linear: expected a linear layer, one of self_attn\.q_proj, self_attn\.k_pro"
    ):
        linear_features(block, "mlp.up_proj.parts.1", 0)


@pytest.mark.parametrize("num_rows", [64, 200, 4096])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_rows_are_split_into_whole_strips(num_rows: int, members: int) -> None:
    firsts = split_rows(num_rows, members)
    assert (firsts[0], firsts[-1], len(firsts)) == (0, num_rows, members + 1)
    assert all(first % 64 == 0 for first in firsts[:-1])
    sizes = [b - a for a, b in itertools.pairwise(firsts)]
    assert max(sizes) - min(sizes) <= 64


@pytest.mark.cuda
def test_two_gpus_compute_what_one_computes(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    save_checkpoint("llama", tmp_path, **SIZES["llama"])
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    alone, together = (Engine(stack(tmp_path, "none", devices)) for devices in ((first,), (first, second)))
    for ours, theirs in zip(session_outputs(together, SPAN), session_outputs(alone, SPAN), strict=True):
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()  # cuBLAS chooses kernels by shape
