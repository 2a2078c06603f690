"""Makes random Llama checkpoints for the benchmarks, tensor by tensor, without a hub.

python benchmarks/make_model.py bench-1b            # 1.1 B parameters, float32, 4.1 GiB
python benchmarks/make_model.py bench-8b            # 7.2 B parameters, bfloat16, 13.5 GiB: for GPUs
python benchmarks/make_model.py bench-100m --output /tmp/models
"""

from __future__ import annotations

import argparse
import json
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
SHAPES: dict[str, dict[str, Any]] = {
    "bench-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        dtype="bfloat16",
    ),
    "bench-1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32),
    "bench-mid": dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16),
    "bench-100m": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12),
    "bench-tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=8, num_attention_heads=4),
}


def make_model(name: str, output: Path = DEFAULT_OUTPUT) -> Path:
    """The directory of the checkpoint ``name`` of SHAPES; makes it if it is not there yet."""
    directory = output / name
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
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Size]] = [{}]
    for key, shape in shapes.items():
        if sum(size.numel() for size in shards[-1].values()) * dtype.itemsize > SHARD_BYTES:
            shards.append({})
        shards[-1][key] = shape
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _random(key, shape, generator).to(dtype) for key, shape in shard.items()}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    config.save_pretrained(directory)
    total_size = dtype.itemsize * sum(shape.numel() for shape in shapes.values())
    index.write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}, indent=1))
    return directory


def add_tokenizer(directory: Path) -> None:
    """One whose tokens are words: ``w17`` is that of id 17."""
    vocabulary = {f"w{token}": token for token in range(VOCABULARY)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2").save_pretrained(directory)


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.ones(shape) if "norm" in name else torch.empty(shape).normal_(std=0.02, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    print(make_model(args.name, args.output))


if __name__ == "__main__":
    main()
