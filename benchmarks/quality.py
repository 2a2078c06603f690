"""What a server's quantisations cost in quality: perplexity and greedy tokens, beside the same blocks in float32.

    python benchmarks/quality.py                                  # the shipped model, a minute
    python benchmarks/quality.py --model DIRECTORY_OR_GGUF --tokens 8192
    python benchmarks/quality.py --model smollm2 --formats all --tokens 2048    # packed in each published format first
    python benchmarks/quality.py --model smollm2 --calibrated    # rounded by "swarm quantize" first

The text is Python documentation that the shipped model was not trained on. Blocks are loaded and quantised as a server
does, and computed with in this process; embeddings and head are in float32. What GPUs compute in fp8 is emulated. A
greedy token agrees if the quantised model finds the same token most likely after the same text. Weights are packed in a
format by rounding to the nearest, and compared with their own dequantised ones. A calibrated model is compared with the
one that it is made of. For types of GGUF, whose readers have tests of their own, the dequantised weights are stored. A
matrix whose rows the blocks of a type do not divide is in the type that llama.cpp takes instead.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import json_row, write_json
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from swarm_cli.quantize.quantize import quantize_checkpoint
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.checkpoints.gguf.tokenizer import read_tokenizer
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_models.quantization import Report, quantize_
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache
from swarm_server.kv.kv_rows import Channel

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import published

WINDOW = 256  # tokens that are predicted from one another
CPU = torch.device("cpu")
QUANTS = ("int8", "int4", "fp8")
PERPLEXITY = {"int8": 1.001, "int4": 1.05, "fp8": 1.02}  # beside float32, at most
KV_PERPLEXITY = 1.005  # with keys and values in int8, beside those in float32
BITS = {"int4": 5.0}  # for each quantised weight, with scales, at most
GGUF_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"),  # that the package gguf can write
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


def gguf_weight(weight: torch.Tensor, kind: str) -> published.Packed:
    """Return the weight as a GGUF file of this type gives it, dequantised to float32."""
    import gguf
    from k_quants import OTHERWISE, ROUND, SHARED

    if weight.shape[1] % SHARED:
        kind = OTHERWISE.get(kind, kind)
    if kind in ROUND:
        found = ROUND[kind](weight)
    else:
        ggml = gguf.GGMLQuantizationType[kind]
        found = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), ggml), ggml).copy())
    return {".weight": found}, found


FORMATS: dict[str, tuple[Any, published.Packer]] = {
    "fp8 in blocks": (published.fp8_config((128, 128)), lambda weight: published.fp8_blocks(weight, (128, 128))),
    "gptq": (published.gptq_config(), lambda weight: published.gptq(weight, group=64)),
    "awq": (published.AWQ_CONFIG, lambda weight: published.awq(weight, group=64)),
    "compressed-tensors": (
        published.compressed_config("pack-quantized", 4, strategy="group"),
        lambda weight: published.compressed_words(weight, group=32, bits=4),
    ),
    "compressed-tensors fp8": (
        published.compressed_config("float-quantized", 8, "float", strategy="channel"),
        lambda weight: published.fp8_rows(weight, (len(weight), 1)),
    ),
    "compressed-tensors int8": (
        published.compressed_config("int-quantized", 8, strategy="channel"),
        published.int8_rows,
    ),
    "bitsandbytes nf4": (
        published.bitsandbytes_config(4),
        lambda weight: published.bitsandbytes_4bit(weight, "nf4", nested=True),
    ),
    "bitsandbytes int8": (published.bitsandbytes_config(8), published.bitsandbytes_int8),
    **{f"GGUF {kind}": (None, partial(gguf_weight, kind=kind)) for kind in GGUF_TYPES},
}


@dataclass(frozen=True)
class Measured:
    """How one model predicts the text.

    Attributes:
        nats: [tokens], minus the logarithm of the probability that the text's token has at each position.
        greedy: [tokens], the most likely next token at each position.
        loading_s: of the blocks, for 100 million weights, on one thread.
    """

    nats: torch.Tensor
    greedy: torch.Tensor
    bits: float
    loading_s: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats.double().mean())

    def ratio(self, other: Measured) -> tuple[float, float]:
        """How many times the perplexity of the other, and the standard error of that, from the differences by token."""
        differences = (self.nats - other.nats).double()
        ratio = math.exp(differences.mean())
        return ratio, ratio * differences.std().item() / math.sqrt(len(differences))


class Int8Cache(DynamicCache):
    """Keys and values as a server with ``--kv-quant int8`` reads them, those of the new positions too."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(_in_int8(keys), _in_int8(values), *args, **kwargs)


def _in_int8(data: torch.Tensor) -> torch.Tensor:
    channel = Channel(data.shape[1], data.shape[3], data.dtype, in_int8=True)
    return channel.expanded(channel.rounded(data))


def measure(path: Path, quant: str, windows: torch.Tensor, kv_quant: str = "none") -> Measured:
    """windows: [n, WINDOW] tokens."""
    model, report, loading_s = load(path, quant)
    nats, greedy = [], []
    with torch.inference_mode():
        for window in windows:
            cache = None if kv_quant == "none" else Int8Cache(config=model.config)
            logits = model(window[None], past_key_values=cache, use_cache=cache is not None).logits[0, :-1]
            nats.append(F.cross_entropy(logits, window[1:], reduction="none"))
            greedy.append(logits.argmax(-1))
    params = max(1, report.quantised_params)
    bits = 8 * report.quantised_bytes / params
    return Measured(torch.cat(nats), torch.cat(greedy), bits, loading_s / params * 100_000_000)


def load(path: Path, quant: str) -> tuple[PreTrainedModel, Report, float]:
    """The stock model around a server's blocks, and the seconds that loading and quantising these took."""
    checkpoint, report = ModelCheckpoint.open(path), Report(quant)
    family = checkpoint.family
    layers = PackedLayers(WeightCache(0), quant, CPU, torch.float32, family)

    def transform(block: torch.nn.Module, index: int) -> None:
        nonlocal report
        report += quantize_(block, quant, CPU, torch.float32, eight_bits=layers.eight_bits(index), emulated=True)

    start = time.perf_counter()
    stack = load_blocks(checkpoint, family.all_blocks, transform=transform, layers=layers)
    seconds = time.perf_counter() - start
    with hf_loader():
        model = AutoModelForCausalLM._model_mapping[type(checkpoint.config)].from_pretrained(
            None, config=checkpoint.config, state_dict=checkpoint.client_tensors(), dtype=torch.float32
        )
    blocks = torch.nn.ModuleList(stack.original(index) for index in family.all_blocks)
    setattr(family.owner_of(model.base_model), family.blocks, blocks)
    return model.eval(), report + layers.report, seconds


def text_windows(path: Path, num_tokens: int) -> torch.Tensor:
    """[n, WINDOW], spread over the text."""
    tokenizer = read_tokenizer(str(path)) if path.suffix == ".gguf" else AutoTokenizer.from_pretrained(path)
    text = (Path(locate(DEFAULT_MODEL)) / "heldout.txt").read_text()
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    starts = torch.linspace(0, len(ids) - WINDOW, max(1, num_tokens // WINDOW)).long()
    return torch.stack([ids[start : start + WINDOW] for start in starts])


def repacked(path: Path, form: str, directory: Path) -> Path:
    """Write a checkpoint whose blocks have their linear weights packed in this format, and return its directory."""
    config, pack = FORMATS[form]
    checkpoint = ModelCheckpoint.open(path)
    checkpoint.whole_config.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in checkpoint.stored(lambda _name: True).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = stored.read()
            continue
        for end, part in pack(stored.read().float())[0].items():
            tensors[name.removesuffix(".weight") + end] = part.contiguous()
    published.write_shards(directory, tensors)
    if config is not None:
        published.edit_config(directory, quantization_config=config)
    return directory


def rows_of(
    name: str, path: Path, windows: torch.Tensor, exact: Measured | None = None, quants: Sequence[str] = QUANTS
) -> Iterator[dict[str, Any]]:
    """Yield the rows of each quantisation of one checkpoint, beside ``exact`` or its own dequantised weights."""
    exact = exact or measure(path, "none", windows)
    for quant in quants:
        found = measure(path, quant, windows)
        what, (ratio, error) = f"{name}, {quant}", found.ratio(exact)
        beside = {"beside": exact.perplexity, "ratio": ratio, "standard_error": error}
        yield json_row(f"{what}: perplexity", found.perplexity, PERPLEXITY[quant], **beside, at_most=True)
        yield json_row(f"{what}: greedy tokens that agree", (found.greedy == exact.greedy).double().mean().item())
        yield json_row(f"{what}: bits per weight", found.bits, BITS.get(quant), at_most=True)
        yield json_row(f"{what}: seconds to load 100 M weights", found.loading_s)


def all_rows(args: argparse.Namespace, windows: torch.Tensor) -> Iterator[dict[str, Any]]:
    exact = measure(args.model, "none", windows)
    yield from rows_of("as it is", args.model, windows, exact)
    for quant in ("none", "int8"):
        found, beside = (measure(args.model, quant, windows, kv_quant) for kv_quant in ("int8", "none"))
        ratio, error = found.ratio(beside)
        yield json_row(
            f"keys and values in int8 beside weights in {quant}: perplexity",
            *(found.perplexity, KV_PERPLEXITY),
            **{"beside": beside.perplexity, "ratio": ratio, "standard_error": error, "at_most": True},
        )
        agree = (found.greedy == beside.greedy).double().mean().item()
        yield json_row(f"keys and values in int8 beside weights in {quant}: greedy tokens that agree", agree)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if args.calibrated:
            start = time.perf_counter()
            quantize_checkpoint(str(args.model), None, directory / "calibrated")
            yield json_row("calibrated: seconds to round", time.perf_counter() - start)
            yield from rows_of("calibrated", directory / "calibrated", windows, exact, ("int4",))
        for form in FORMATS if "all" in args.formats else args.formats:
            yield from rows_of(form, repacked(args.model, form, directory / form), windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=lambda name: Path(locate(name)), default=DEFAULT_MODEL, help="a directory, GGUF file or smollm2"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument(
        "--formats", nargs="+", choices=[*FORMATS, "all"], default=[], help="in which the model is packed, too"
    )
    parser.add_argument("--calibrated", action="store_true", help="measure the result of swarm quantize, too")
    parser.add_argument("--quick", action="store_true", help="512 tokens, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows = text_windows(args.model, 512 if args.quick else args.tokens)
    rows = []
    for row in all_rows(args, windows):
        beside = ""
        if row["beside"] is not None:
            beside = f", float32 {row['beside']:.4f}, {row['ratio'] - 1:+.2%} ± {row['standard_error']:.2%}"
        target = "" if row["met"] is None else f"; target {row['target']}, met: {row['met']}"
        print(f"{row['name']}: {row['measured']:.4f}{beside}{target}", flush=True)
        rows.append(row)
    if args.json:
        write_json(args.json, vars(args), rows=rows)


if __name__ == "__main__":
    main()
