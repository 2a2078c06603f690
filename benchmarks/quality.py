"""What a server's quantisations cost in quality: perplexity and greedy tokens, beside the same blocks in float32.

    python benchmarks/quality.py                                  # the shipped model, a minute
    python benchmarks/quality.py --model DIRECTORY_OR_GGUF --tokens 8192
    python benchmarks/quality.py --model DIRECTORY --formats gptq awq    # packed so first, by round-to-nearest

The text is Python documentation that the shipped model was not trained on. Blocks are loaded and quantised as a server
does, and computed with in this process; embeddings and head are in float32. A greedy token agrees if the quantised
model finds the same token most likely after the same text. A format is compared with its own dequantised weights.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import json_row, write_json
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_models.checkpoints.gguf.tokenizer import read_tokenizer
from swarm_models.checkpoints.hollow_model import hf_loader
from swarm_models.quantization import Report, quantize_
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.packed_layers import PackedLayers
from swarm_server.blocks.weight_cache import WeightCache

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import published

WINDOW = 256  # tokens that are predicted from one another
CPU = torch.device("cpu")
QUANTS = ("int8", "int4")
PERPLEXITY = {"int8": 1.001, "int4": 1.05}  # beside float32, at most
BITS = {"int4": 5.0}  # for each quantised weight, with scales, at most
FORMATS: dict[str, tuple[Any, published.Packer]] = {
    "gptq": (published.gptq_config(), lambda weight: published.gptq(weight, group=64)),
    "awq": (published.AWQ_CONFIG, lambda weight: published.awq(weight, group=64)),
    "compressed-tensors": (
        published.compressed_config("pack-quantized", 4, strategy="group"),
        lambda weight: published.compressed_words(weight, group=32, bits=4),
    ),
    "bitsandbytes nf4": (
        published.bitsandbytes_config(4),
        lambda weight: published.bitsandbytes_4bit(weight, "nf4", nested=True),
    ),
}


@dataclass(frozen=True)
class Measured:
    """How one model predicts the text.

    Attributes:
        greedy: [tokens], the most likely next token at each position.
        loading_s: of the blocks, for 100 million weights, on one thread.
    """

    perplexity: float
    greedy: torch.Tensor
    bits: float
    loading_s: float


def measure(path: Path, quant: str, windows: torch.Tensor) -> Measured:
    """windows: [n, WINDOW] tokens."""
    model, report, loading_s = load(path, quant)
    nats, greedy = 0.0, []
    with torch.inference_mode():
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1]
            nats += F.cross_entropy(logits, window[1:]).item() / len(windows)
            greedy.append(logits.argmax(-1))
    params = max(1, report.quantised_params)
    return Measured(
        math.exp(nats), torch.cat(greedy), 8 * report.quantised_bytes / params, loading_s / params * 100_000_000
    )


def load(path: Path, quant: str) -> tuple[PreTrainedModel, Report, float]:
    """The stock model around a server's blocks, and the seconds that loading and quantising these took."""
    checkpoint, report = ModelCheckpoint.open(path), Report(quant)
    family = checkpoint.family
    layers = PackedLayers(WeightCache(0), quant, CPU, torch.float32, family)

    def transform(block: torch.nn.Module, index: int) -> None:
        nonlocal report
        report += quantize_(block, quant, CPU, torch.float32, eight_bits=layers.eight_bits(index))

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
    """A checkpoint with the linear weights of its blocks packed in this format."""
    config, pack = FORMATS[form]
    shutil.copytree(path, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        for name, tensor in load_file(file).items():
            if not name.endswith("_proj.weight"):
                stored[name] = tensor
                continue
            for end, part in pack(tensor.float())[0].items():
                stored[name.removesuffix(".weight") + end] = part.contiguous()
    published.write_shards(directory, stored)
    published.edit_config(directory, quantization_config=config)
    return directory


def rows_of(name: str, path: Path, windows: torch.Tensor) -> Iterator[dict[str, Any]]:
    exact = measure(path, "none", windows)
    for quant in QUANTS:
        found = measure(path, quant, windows)
        what, ratio = f"{name}, {quant}", found.perplexity / exact.perplexity
        beside = {"beside": exact.perplexity, "ratio": ratio}
        yield json_row(f"{what}: perplexity", found.perplexity, PERPLEXITY[quant], **beside, at_most=True)
        yield json_row(f"{what}: greedy tokens that agree", (found.greedy == exact.greedy).double().mean().item())
        yield json_row(f"{what}: bits per weight", found.bits, BITS.get(quant), at_most=True)
        yield json_row(f"{what}: seconds to load 100 M weights", found.loading_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(locate(DEFAULT_MODEL)), help="a directory, or a GGUF file")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[], help="in which the model is packed, too")
    parser.add_argument("--quick", action="store_true", help="512 tokens, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    windows = text_windows(args.model, 512 if args.quick else args.tokens)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for form in ("as it is", *args.formats):
            path = args.model if form == "as it is" else repacked(args.model, form, Path(directory) / form)
            for row in rows_of(form, path, windows):
                beside = "" if row["beside"] is None else f", float32 {row['beside']:.4f}, {row['ratio'] - 1:+.2%}"
                target = "" if row["met"] is None else f"; target {row['target']}, met: {row['met']}"
                print(f"{row['name']}: {row['measured']:.4f}{beside}{target}", flush=True)
                rows.append(row)
    if args.json:
        write_json(args.json, vars(args), rows=rows)


if __name__ == "__main__":
    main()
