"""FP8 products are those of the codes, codes are the nearest ones, and devices without such products are refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.gpu import fp8_weight
from swarm_models.gpu.fp8_weight import Fp8Weight, has_fp8_products, quantize_fp8
from swarm_models.kernels.quantized_linear import QuantizedLinear
from swarm_models.quantization import quantize_, require_device
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache
from swarm_server.machine.memory import hosted_bytes
from tests.unit.models.quantization.test_quantization import BLOCKS, MOE, error, family, matrices
from tests.zoo import VOCAB, save_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((0, 32, 64), (1, 64, 128), (3, 70, 300), (17, 5, 40), (80, 33, 129))  # rows, out, in
HALF_A_STEP, LEAST_HALF_STEP = 2**-4, 2**-10  # of e4m3: relative, and in units of the scale where numbers are tiny
BF16_HALF_STEP = 2**-8  # relative, at most
BLOCK_ERROR = 0.12  # relative, of one block: weights and activations have four significant bits


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return Fp8Weight(*quantize_fp8(x)).dequantize()


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    x = (torch.randn(40, 70) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    q, scale = quantize_fp8(x)
    wide, step = x.double(), scale.double()[:, None]
    most = (wide.abs() * HALF_A_STEP).maximum(step * LEAST_HALF_STEP) * (1 + 1e-6)
    assert ((rounded(x).double() - wide).abs() <= most).all()
    assert (q.view(torch.float8_e4m3fn).float().abs().amax(1) == 448).all()


def check_product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Compare with the codes' product in fp64: what is left is the order of sums, and rounding to bfloat16."""
    num_rows, width_out, width_in = shape
    x, weight = torch.randn(num_rows, width_in).to(dtype), torch.randn(width_out, width_in)
    ours, theirs = rounded(x).double(), rounded(weight).double()
    expected, size = ours @ theirs.T, ours.abs() @ theirs.abs().T
    fp8 = Fp8Weight(*quantize_fp8(weight.to(device)))
    assert torch.equal(fp8.dequantize().cpu(), rounded(weight)), "all devices round alike"
    output = fp8.matmul(x.to(device)).cpu()
    assert output.shape == expected.shape and output.dtype == dtype
    # Tensor cores keep at least 13 bits of a sum between two of their steps; fp32 on the CPU keeps 24.
    most = expected.abs() * BF16_HALF_STEP * 1.1 + size * (1e-6 if device == CPU else 2**-12)
    assert ((output.double() - expected).abs() <= most).all()
    # Beside the input as it came: each number of it is off by half a step of e4m3 at most.
    off = (x.double().abs() * HALF_A_STEP).maximum(quantize_fp8(x)[1].double()[:, None] * LEAST_HALF_STEP)
    assert ((output.double() - x.double() @ theirs.T).abs() <= most + 1.001 * off @ theirs.abs().T).all()
    if num_rows > 2:  # a row that is not finite spoils no other
        x[0, 0], x[2, 1] = float("nan"), float("inf")
        spoiled = fp8.matmul(x.to(device)).cpu()
        assert not spoiled[[0, 2]].isfinite().any()
        kept = [1, *range(3, num_rows)]
        assert torch.equal(spoiled[kept], output[kept])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_codes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_product(shape, dtype, CPU)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096, 4096), (300, 1024, 4096)])
def test_products_on_cuda(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    if not has_fp8_products(CUDA):
        pytest.skip("this GPU has no FP8 products")
    check_product(shape, dtype, CUDA)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_layer_has_the_gradient_of_its_dequantised_weight(dtype: torch.dtype) -> None:
    plain = torch.nn.Linear(40, 24)
    layer = QuantizedLinear(Fp8Weight(*quantize_fp8(plain.weight.detach())), plain.bias)
    x = torch.randn(2, 3, 40).to(dtype).requires_grad_()
    output = layer(x)
    assert output.dtype == dtype and output.shape == (2, 3, 24)
    assert error(output.float(), plain(x.float())) < 0.05
    upstream = torch.randn(2, 3, 24).to(dtype)
    output.backward(upstream)
    assert error(x.grad.float(), upstream.float() @ layer.weight) < {torch.float32: 1e-6}.get(dtype, 0.01)


def test_extreme_rows_and_zeros() -> None:
    weight, x = torch.randn(32, 64), torch.randn(4, 64)
    weight[3] = 0
    x[1], x[2], x[3] = 0, x[2] * 1e-15, x[3] * 1e15
    result = Fp8Weight(*quantize_fp8(weight)).matmul(x)
    assert not result[1].any() and not result[:, 3].any()
    for row in (0, 2, 3):
        assert error(result[row], x[row] @ weight.T) < 0.1


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-7b", *MOE])
def test_blocks_of_families(name: str) -> None:
    original = family(name)
    block, report = original.quantised(BLOCKS - 1, "fp8", emulated=True)
    assert (report.num_linears, report.num_expert_weights) == matrices(original.blocks[BLOCKS - 1])
    hidden = original.inputs[BLOCKS - 1][0].clone().requires_grad_()
    output = original.run(block, BLOCKS - 1, hidden)
    assert 0.005 < error(output.detach(), original.outputs[BLOCKS - 1]) < BLOCK_ERROR
    output.sum().backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gpt2", *MOE])
def test_blocks_on_cuda_are_those_that_are_emulated(name: str) -> None:
    """For one linear layer after the other: between layers, tiny differences become steps of e4m3."""
    if not has_fp8_products(CUDA):
        pytest.skip("this GPU has no FP8 products")
    emulated, _ = family(name).quantised(BLOCKS - 1, "fp8", emulated=True)
    on_gpu, _ = family(name).quantised(BLOCKS - 1, "fp8", device=CUDA)
    layers = dict(on_gpu.named_modules())
    for path, layer in emulated.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(layer.weight, layers[path].weight.cpu())
            x = torch.randn(5, layer.in_features)
            assert error(layers[path](x.to(CUDA)).cpu(), layer(x)) < 2**-8


def test_logits_of_a_tiny_model_beside_transformers(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path, initializer_range=0.1)
    checkpoint = ModelCheckpoint.open(tmp_path)
    layers = PackedLayers(WeightCache(0), "fp8", CPU, torch.float32, checkpoint.family)
    report = layers.report

    def transform(block: torch.nn.Module, _index: int) -> None:
        nonlocal report
        report += quantize_(block, "fp8", CPU, torch.float32, emulated=True)

    stack = load_blocks(checkpoint, checkpoint.family.all_blocks, transform=transform, layers=layers)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.randint(3, VOCAB, (2, 24))
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        model.model.layers = torch.nn.ModuleList(stack.original(index) for index in checkpoint.family.all_blocks)
        logits = model(tokens, use_cache=False).logits
    assert 0.005 < error(logits, expected) < BLOCK_ERROR * BLOCKS**0.5
    assert (report + layers.report).quantised_bytes <= sum(hosted_bytes(checkpoint, "fp8"))


def test_devices_without_such_products_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"cpu has no FP8 products, .* expected int8, int4, nf4, none, bnb-int8"):
        quantize_(torch.nn.Sequential(), "fp8", CPU, torch.float32)
    with pytest.raises(ValueError, match=r"mps has no FP8 products, .* expected none"):
        require_device("fp8", torch.device("mps"))
    assert caplog.text == ""


def test_gpus_are_asked_for_their_compute_capability_and_then_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    capability = (8, 6)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(fp8_weight, "_is_right", lambda *_: False)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(ValueError, match=r"cuda:5 has no FP8 products, .* expected int8, nf4, none, bnb-int8"):
            require_device("fp8", torch.device("cuda", 5))
        assert caplog.text == ""
        capability = (8, 9)
        assert not has_fp8_products(torch.device("cuda", 6))
        assert "products in FP8 cannot be used on cuda:6: they give something else" in caplog.text
        monkeypatch.setattr(fp8_weight, "_is_right", lambda *_: True)
        assert has_fp8_products(torch.device("cuda", 7))
    has_fp8_products.cache_clear()


def test_what_is_tried_on_gpus_is_right_here() -> None:
    assert all(fp8_weight._is_right(*shape, CPU) for shape in fp8_weight._TRIED)
