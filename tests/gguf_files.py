"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.zoo import make_config, save_checkpoint

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q and k in the order of llama.cpp: pairs that are rotated together lie side by side."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    *,
    name: str = "llama",
    type: str = "F32",
    num_shards: int = 1,
    rope_freqs: torch.Tensor | None = None,
    general_name: str | None = None,
    **overrides: Any,
) -> dict[str, torch.Tensor]:
    """Writes a zoo member, its matrices in this type of ggml; returns what is to be read, by transformers' names.

    Biases, which are zero in a new model, are random.

    With several shards, ``path`` is the directory, and they are ``tiny-00001-of-….gguf``.
    """
    import gguf
    from gguf.quants import dequantize, quantize

    config = make_config(name, **overrides)
    save_checkpoint(name, path.parent / "whole", max_shard_size="1GB", **overrides)
    state = load_file(path.parent / "whole" / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    state |= {full: torch.randn(len(bias), generator=drawn) for full, bias in state.items() if full.endswith(".bias")}
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "gemma2": gguf.MODEL_ARCH.GEMMA2}[
        name
    ]
    writer = gguf.GGUFWriter(
        None, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=-(-len(state) // num_shards) * (num_shards > 1)
    )
    if general_name is not None:
        writer.add_name(general_name)
    _write_config(writer, config)
    kind = gguf.GGMLQuantizationType[type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    expected: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}

    def add(full: str, tensor: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Returns the tensor as it is to be read."""
        base, dot, end = full.rpartition(".")
        stored_name = (
            names.get_name(base) + dot + end if end in ("weight", "bias") else names.get_name(full) + ".weight"
        )
        stored = tensor if heads is None else permuted(tensor, heads)
        if tensor.ndim < 2:
            writer.add_tensor(stored_name, stored.numpy())
            return tensor
        data = quantize(stored.contiguous().numpy(), kind)
        writer.add_tensor(stored_name, data, raw_dtype=kind)
        read = torch.from_numpy(np.array(dequantize(data, kind))).view(stored.shape)
        if heads is None:
            return read
        return read.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)

    for full, tensor in state.items():
        if ".experts." in full:
            prefix, _, rest = full.partition(".experts.")
            experts.setdefault(f"{prefix}.experts.{rest.split('.')[1]}.weight", []).append(tensor)
        elif "norm" in full and name.startswith("gemma"):
            add(full, tensor + 1)
            expected[full] = (tensor + 1) - 1
        else:
            heads = (
                {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if name == "llama" else {}
            )
            expected[full] = add(full, tensor, heads.get(full.split(".")[-2]))
    fused: dict[str, dict[str, torch.Tensor]] = {}
    for full, parts in experts.items():
        prefix, projection, _ = full.rsplit(".", 2)
        fused.setdefault(prefix, {})[projection] = add(full, torch.stack(parts))
    for prefix, parts in fused.items():
        expected[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        expected[f"{prefix}.down_proj"] = parts["down_proj"]
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    writer.write_header_to_file(path / "tiny.gguf" if num_shards > 1 else path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _write_config(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    characters = [chr(code) for code in range(33, 127)]
    tokens = ["<pad>", "<s>", "</s>", *characters, "ab", *(f"<{i}>" for i in range(config.vocab_size - 98))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
