"""Makes random Llama checkpoints for the benchmarks, tensor by tensor, without a hub.

python benchmarks/make_model.py bench-1b            # 1.1 B parameters, float32, 4.1 GiB
python benchmarks/make_model.py bench-8b            # 7.2 B parameters, bfloat16, 13.5 GiB: for GPUs
python benchmarks/make_model.py bench-8b --blocks 0:8   # only what a server of these blocks reads
python benchmarks/make_model.py bench-100m --output /tmp/models
"""

from __future__ import annotations

import argparse
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DEFAULT_OUTPUT = Path(__file__).parent.parent / "bench-models"
SHARD_BYTES = 1 << 30
VOCABULARY = 32000
_MOST_THREADS = 4  # each holds a shard twice, once in float32
SHAPES: dict[str, dict[str, Any]] = {
    "bench-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype="bfloat16",
    ),
    "bench-8b-quarter": dict(  # 8 of the blocks of bench-8b, with its head
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype="bfloat16",
    ),
    "bench-1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32),
    "bench-mid": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16),
    "bench-100m": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12),
    "bench-tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=8, num_attention_heads=4),
    "bench-thin": dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
}


def make_model(name: str, output: Path = DEFAULT_OUTPUT, blocks: range | None = None) -> Path:
    """The directory of the checkpoint ``name`` of SHAPES; makes it if it is not there yet.

    ``blocks``: of the blocks only these are written, in a directory of their own, as a server of them reads no others.
    """
    directory = output / (name if blocks is None else f"{name}-{blocks.start}-{blocks.stop}")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    common = dict(vocab_size=VOCABULARY, num_key_value_heads=4, max_position_embeddings=4096, dtype="float32")
    config = LlamaConfig(**common | SHAPES[name])
    dtype = getattr(torch, (common | SHAPES[name])["dtype"])
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in LlamaForCausalLM(config).state_dict().items()}
    shards: list[dict[str, torch.Size]] = [{}]
    for key, shape in shapes.items():
        if blocks is not None and not _is_among(key, blocks):
            continue
        if sum(size.numel() for size in shards[-1].values()) * dtype.itemsize > SHARD_BYTES:
            shards.append({})
        shards[-1][key] = shape
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def write(shard: dict[str, torch.Size], file: str) -> None:
        tensors = {key: _random(key, shape).to(dtype) for key, shape in shard.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(write, shards, files))
    weight_map = {key: file for shard, file in zip(shards, files, strict=True) for key in shard}
    config.save_pretrained(directory)
    total_size = dtype.itemsize * sum(shapes[key].numel() for key in weight_map)
    index.write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=1))
    return directory


def _is_among(key: str, blocks: range) -> bool:
    """Whether this tensor belongs to one of the blocks, or to none, as the head does."""
    words = key.split(".")
    return "layers" not in words or int(words[words.index("layers") + 1]) in blocks


def add_tokenizer(directory: Path) -> None:
    """One whose tokens are words: ``w17`` is that of id 17."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(directory)


def _random(name: str, shape: torch.Size) -> torch.Tensor:
    """The same numbers for the same name, whichever thread makes them and whatever else is made."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.ones(shape) if "norm" in name else torch.empty(shape).normal_(std=0.02, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--blocks", type=block_range, metavar="START:END", help="write only these blocks, and the head")
    args = parser.parse_args()
    print(make_model(args.name, args.output, args.blocks))


def block_range(text: str) -> range:
    """Parse START:END."""
    start, _, end = text.partition(":")
    if not (start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise argparse.ArgumentTypeError(f"blocks are {text!r}: expected START:END, such as 0:8")
    return range(int(start), int(end))


if __name__ == "__main__":
    main()
