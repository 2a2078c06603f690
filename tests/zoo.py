"""Tiny random checkpoints of many model families, saved the way the hub stores large ones: in shards.

``CONFIGS`` maps a name to (model type, config arguments); ``SUPPORTED`` names those that split exactly, ``REJECTED``
those that must be refused with a sentence.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Literal

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

HIDDEN, BLOCKS, VOCAB, HEADS, KV_HEADS, FFN, POSITIONS = 64, 6, 128, 4, 2, 96, 256
PAD, BOS, EOS = 0, 1, 2
SLIDING = 8  # window and chunk length, shorter than every test sequence
INITIALIZER_RANGE = 0.2  # ten times the usual one, so that a wrong block changes the output visibly

TOKENS = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
MAMBA = dict(hidden_size=HIDDEN, num_hidden_layers=BLOCKS, vocab_size=VOCAB, **TOKENS)
FALCON = dict(MAMBA, num_attention_heads=HEADS)
NEOX = dict(FALCON, intermediate_size=FFN, max_position_embeddings=POSITIONS)
COMMON = dict(NEOX, num_key_value_heads=KV_HEADS)
SMALL_HEADS = dict(COMMON, head_dim=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
GPT = dict(n_embd=HIDDEN, n_layer=BLOCKS, n_head=HEADS, vocab_size=VOCAB, n_positions=POSITIONS, **TOKENS)
OPT = dict(FALCON, ffn_dim=FFN, max_position_embeddings=POSITIONS)
CONVOLUTIONS = ["conv", "conv", "full_attention"] * (BLOCKS // 3)
DELTA = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
STATES = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
LATENT_HEADS = dict(num_key_value_heads=HEADS, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
LATENT_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
LATENT = COMMON | LATENT_HEADS | LATENT_EXPERTS | dict(num_local_experts=4)
ROUTED = COMMON | LATENT_HEADS | LATENT_EXPERTS | dict(n_routed_experts=4, topk_group=1, q_lora_rank=32)
INDEXED = dict(
    ROUTED,
    n_group=1,
    index_topk=SLIDING,  # so that the index leaves positions out
    index_head_dim=16,
    index_n_heads=16,  # with few heads, scores of exactly 0 are equal
)

CONFIGS: dict[str, tuple[str, dict]] = {
    "bloom": ("bloom", dict(hidden_size=HIDDEN, n_layer=BLOCKS, n_head=HEADS, vocab_size=VOCAB, **TOKENS)),
    "llama": ("llama", COMMON),
    "falcon-rw": (
        "falcon",
        dict(FALCON, alibi=True, new_decoder_architecture=False, multi_query=False, parallel_attn=False, bias=True),
    ),
    "falcon-7b": (
        "falcon",
        dict(FALCON, alibi=False, new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False),
    ),
    "falcon-40b": (
        "falcon",
        dict(FALCON, alibi=False, new_decoder_architecture=True, num_kv_heads=KV_HEADS, bias=False),
    ),
    "mixtral": ("mixtral", dict(COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "mistral-sliding": ("mistral", dict(SMALL_HEADS, sliding_window=SLIDING)),
    "opt": ("opt", dict(OPT, word_embed_proj_dim=HIDDEN)),
    "opt-projected": ("opt", dict(OPT, word_embed_proj_dim=HIDDEN // 2, do_layer_norm_before=False)),
    "gpt2": ("gpt2", dict(GPT, scale_attn_by_inverse_layer_idx=True)),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "gpt_neo": (
        "gpt_neo",
        dict(
            hidden_size=HIDDEN,
            num_layers=BLOCKS,
            num_heads=HEADS,
            vocab_size=VOCAB,
            max_position_embeddings=POSITIONS,
            attention_types=[[["global", "local"], BLOCKS // 2]],
            window_size=SLIDING,
            **TOKENS,
        ),
    ),
    "gpt_neox": ("gpt_neox", NEOX),
    "gptj": ("gptj", dict(GPT, rotary_dim=8)),
    "qwen2": ("qwen2", COMMON),
    "qwen2-sliding": ("qwen2", dict(COMMON, use_sliding_window=True, sliding_window=SLIDING, max_window_layers=2)),
    "qwen2_moe": ("qwen2_moe", dict(COMMON, **EXPERTS, shared_expert_intermediate_size=48)),
    "qwen3": ("qwen3", SMALL_HEADS),
    "qwen3_moe": ("qwen3_moe", dict(SMALL_HEADS, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3])),
    "gemma": ("gemma", SMALL_HEADS),
    "gemma2": ("gemma2", dict(SMALL_HEADS, sliding_window=SLIDING)),
    "gemma3_text": ("gemma3_text", dict(SMALL_HEADS, sliding_window=SLIDING)),
    "phi": ("phi", COMMON),
    "phi3": ("phi3", dict(COMMON, sliding_window=None)),
    "olmo2": ("olmo2", COMMON),
    "olmo3": ("olmo3", dict(COMMON, sliding_window=SLIDING)),
    "stablelm": ("stablelm", COMMON),
    "starcoder2": ("starcoder2", COMMON),
    "cohere": ("cohere", COMMON),
    "cohere2": ("cohere2", dict(COMMON, sliding_window=SLIDING)),
    "glm": ("glm", SMALL_HEADS),
    "glm4": ("glm4", SMALL_HEADS),
    "granite": (
        "granite",
        dict(
            COMMON, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.25, logits_scaling=8.0
        ),
    ),
    "mpt": ("mpt", dict(d_model=HIDDEN, n_layers=BLOCKS, n_heads=HEADS, vocab_size=VOCAB, max_seq_len=256, **TOKENS)),
    "gpt_oss": (
        "gpt_oss",
        dict(SMALL_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=SLIDING),
    ),
    "smollm3": ("smollm3", COMMON),
    "deepseek_v3": ("deepseek_v3", dict(ROUTED, n_group=2, first_k_dense_replace=2)),
    "llama4_text": (
        "llama4_text",
        dict(
            SMALL_HEADS,
            intermediate_size_mlp=FFN,
            num_local_experts=2,
            attention_chunk_size=SLIDING,
            interleave_moe_layer_step=2,
        ),
    ),
    "nemotron": ("nemotron", COMMON),
    "exaone4": ("exaone4", dict(COMMON, sliding_window=SLIDING, sliding_window_pattern=4)),
    "nanochat": ("nanochat", COMMON),
    "gemma4_unified_text": ("gemma4_unified_text", dict(SMALL_HEADS, sliding_window=SLIDING)),
    "xglm": (
        "xglm",
        dict(
            d_model=HIDDEN,
            num_layers=BLOCKS,
            attention_heads=HEADS,
            ffn_dim=FFN,
            vocab_size=VOCAB,
            max_position_embeddings=POSITIONS,
            **TOKENS,
        ),
    ),
    # -- blocks with an index that chooses what is attended to
    "deepseek_v32": ("deepseek_v32", dict(INDEXED, n_group=2, first_k_dense_replace=2)),
    "axk2": ("axk2", INDEXED),
    "glm_moe_dsa": ("glm_moe_dsa", INDEXED),
    "dots3_note_text": (
        "dots3_note_text",
        dict(
            INDEXED,
            sliding_window=SLIDING,
            shared_experts_intermediate_size=32,
            head_dim=24,
            swa_num_attention_heads=2,
            swa_num_key_value_heads=2,
            swa_q_lora_rank=32,
            swa_kv_lora_rank=32,
            swa_head_dim=24,
            swa_qk_nope_head_dim=16,
            swa_v_head_dim=16,
        ),
    ),
    # -- blocks with convolutions, or with recurrent states
    "lfm2": ("lfm2", dict(COMMON, layer_types=CONVOLUTIONS, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": ("lfm2_moe", dict(COMMON, **EXPERTS, layer_types=CONVOLUTIONS, num_dense_layers=2)),
    "lfm3": ("lfm3", dict(COMMON, layer_types=CONVOLUTIONS)),
    "qwen3_next": ("qwen3_next", dict(SMALL_HEADS, **EXPERTS, **DELTA, shared_expert_intermediate_size=48)),
    "qwen3_5_text": ("qwen3_5_text", dict(SMALL_HEADS, **DELTA)),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", dict(SMALL_HEADS, **EXPERTS, **DELTA, shared_expert_intermediate_size=48)),
    "olmo_hybrid": ("olmo_hybrid", dict(COMMON, **dict(DELTA, linear_num_key_heads=4))),
    "kimi_linear": (
        "kimi_linear",
        dict(
            LATENT,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * (BLOCKS // 3),
            linear_head_dim=16,
            linear_num_heads=HEADS,
        ),
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        dict(LATENT, layer_group_size=3, head_dim=16, n_group=2, topk_group=1, first_k_dense_replace=2),
    ),
    "bamba": ("bamba", dict(COMMON, attn_layer_indices=[1, 4], mamba_chunk_size=8, **STATES)),
    "falcon_h1": (
        "falcon_h1",
        dict(SMALL_HEADS, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8),
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        dict(
            COMMON,
            layer_types=["mamba", "attention", "mamba"] * (BLOCKS // 3),
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            embedding_multiplier=12.0,
            **STATES,
        ),
    ),
    "nemotron_h": (
        "nemotron_h",
        dict(
            SMALL_HEADS,
            layers_block_type=["mamba", "moe", "attention", "mamba", "mlp", "attention"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            chunk_size=8,
        ),
    ),
    "jamba": (
        "jamba",
        dict(
            COMMON,
            attn_layer_period=3,
            attn_layer_offset=1,
            expert_layer_offset=1,
            num_experts=4,
            mamba_d_state=8,
            mamba_dt_rank=4,
        ),
    ),
    "mamba": ("mamba", dict(MAMBA, state_size=8)),
    "falcon_mamba": ("falcon_mamba", dict(MAMBA, state_size=8)),
    "minimax": ("minimax", dict(SMALL_HEADS, num_local_experts=4, num_experts_per_tok=2, block_size=8)),
    "mamba2": ("mamba2", dict(MAMBA, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8)),
    # -- not splittable
    "gemma3n_text": (
        "gemma3n_text",
        dict(
            SMALL_HEADS,
            sliding_window=SLIDING,
            layer_types=["sliding_attention", "full_attention"] * (BLOCKS // 2),
            num_kv_shared_layers=2,
            intermediate_size=[FFN] * BLOCKS,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            activation_sparsity_pattern=[0.0] * BLOCKS,
        ),
    ),
    "gemma4_text": ("gemma4_text", dict(SMALL_HEADS, sliding_window=SLIDING)),
    "recurrent_gemma": ("recurrent_gemma", dict(SMALL_HEADS, lru_width=HIDDEN, attention_window_size=SLIDING)),
}

MODEL_TYPES = frozenset(model_type for model_type, _ in CONFIGS.values())
CONFIGS = {name: entry for name, entry in CONFIGS.items() if entry[0] in CONFIG_MAPPING}  # before 5.23 there is no lfm3
REJECTED = ("gemma3n_text", "gemma4_text", "recurrent_gemma")
SUPPORTED = tuple(name for name in CONFIGS if name not in REJECTED)
WITH_STATES = SUPPORTED[SUPPORTED.index("lfm2") :]
# Whose blocks are made like those of another member: the slow tests have these too.
ALIKE = (
    *("nanochat", "gemma4_unified_text", "lfm2_moe", "lfm3", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"),
    *("kimi_linear", "bailing_hybrid", "bamba", "granitemoehybrid", "mamba", "falcon_mamba"),
    *("opt", "gpt_neox", "qwen2", "qwen2_moe", "qwen3", "gemma", "gemma2", "phi3", "olmo3", "stablelm", "starcoder2"),
    *("cohere", "glm", "glm4", "granite", "smollm3", "nemotron", "falcon-40b", "gptj", "qwen2-sliding", "qwen3_moe"),
    *("phi", "olmo2", "exaone4", "axk2", "glm_moe_dsa"),
)

_MOST_KEPT_BYTES = 2 << 20  # of a checkpoint
# Checkpoints that were saved before: the config, and the files by name. To make one takes as long as a short test.
_kept: dict[str, tuple[PreTrainedConfig, dict[str, bytes]]] = {}
_TASKS = {"causal-lm": AutoModelForCausalLM, "sequence-classification": AutoModelForSequenceClassification}
_WIDTHS = ("_dim", "_rank", "intermediate_size", "intermediate_size_mlp", "hidden_size", "_d_head", "_d_ssm")


def doubled_widths(name: str) -> dict[str, int]:
    """Overrides that make zoo member ``name`` twice as wide, so that most linear layers have rows for two members."""
    return {
        argument: 2 * value
        for argument, value in CONFIGS[name][1].items()
        if type(value) is int and (argument.endswith(_WIDTHS) or argument in ("n_embd", "d_model"))
    }


def make_config(name: str, **overrides) -> PreTrainedConfig:
    """The config of zoo member ``name``, with ``overrides`` on top of its arguments."""
    model_type, arguments = CONFIGS[name]
    config = CONFIG_MAPPING[model_type](**{**arguments, **overrides})
    if "initializer_range" not in overrides and hasattr(config, "initializer_range"):
        config.initializer_range = INITIALIZER_RANGE
    return config


def save_checkpoint(
    name: str,
    directory: str | Path,
    *,
    task: Literal["causal-lm", "sequence-classification"] = "causal-lm",
    max_shard_size: str = "40KB",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides,
) -> PreTrainedConfig:
    """Writes a random checkpoint of zoo member ``name`` into ``directory``; equal arguments give equal weights.

    ``overrides`` are config arguments (``num_labels=3``, ``num_hidden_layers=4``, …). Returns the config, which is the
    caller's own.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    is_empty = not any(directory.iterdir())  # else transformers removes what an earlier checkpoint has left
    key = repr((name, task, max_shard_size, seed, dtype, sorted(overrides.items())))
    if is_empty and key in _kept:
        kept_config, files = _kept[key]
        for file, content in files.items():
            (directory / file).write_bytes(content)
        return copy.deepcopy(kept_config)
    config = make_config(name, **overrides)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = _TASKS[task].from_config(config, dtype=dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if is_empty and sum(path.stat().st_size for path in directory.iterdir()) <= _MOST_KEPT_BYTES:
        _kept[key] = copy.deepcopy(config), {path.name: path.read_bytes() for path in directory.iterdir()}
    return config
