"""A tiny configuration of any type of language model that transformers knows, shrunk by one rule."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.zoo import BLOCKS, CONFIGS, FFN, HEADS, HIDDEN, KV_HEADS, POSITIONS, SLIDING, TOKENS, VOCAB

HEAD, PART, FEW = 16, 32, 8  # widths: of a head, of an expert, of what is rotated
SIZES: tuple[tuple[int, str], ...] = (
    (
        HIDDEN,
        "hidden_size n_embd d_model emb_dim embedding_dim embedding_size word_embed_proj_dim attention_hidden_size",
    ),
    (FFN, "intermediate_size dense_intermediate_size intermediate_size_mlp ffn_hidden_size ffn_dim n_inner dff"),
    (
        PART,
        "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size shared_expert_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size q_lora_rank",
    ),
    (BLOCKS, "num_hidden_layers n_layer n_layers num_layers moe_layer_end_index"),
    (VOCAB, "vocab_size unpadded_vocab_size"),
    (
        POSITIONS,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length original_max_position_embeddings",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads mamba_num_heads mamba_n_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "zero_expert_num",
    ),
    (
        KV_HEADS,
        "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok "
        "num_experts_per_token moe_k moe_topk first_k_dense_replace n_group num_expert_group max_window_layers",
    ),
    (1, "topk_group"),
    (
        HEAD,
        "head_dim swa_head_dim qk_nope_head_dim v_head_dim kv_lora_rank linear_key_head_dim linear_value_head_dim "
        "linear_head_dim mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size kv_channels",
    ),
    (FEW, "qk_rope_head_dim rotary_dim chunk_size mamba_chunk_size rel_extent"),
    (SLIDING, "sliding_window sliding_window_size attention_chunk_size window_size keep_window_size"),
)
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
IN_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * (BLOCKS // 2)}  # published ones have both kinds
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# What the rule does not reach, and what published checkpoints have that the defaults of transformers have not.
BESIDES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": dict(
        IN_TURNS, rope_parameters={"full_attention": dict(ROPE), "sliding_attention": dict(ROPE)}
    ),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=KV_HEADS, clip_qkv=8, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=FFN, moe_num_experts=HEADS, moe_top_k=2),
    ),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=HEADS, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1),
    "hunyuan_v1_dense": dict(head_dim=HEAD),
    "hunyuan_v1_moe": dict(head_dim=HEAD),
    "inkling_text": dict(layer_types=["hybrid_sliding", "hybrid_sliding", "hybrid"] * (BLOCKS // 3)),
    "laguna": IN_TURNS,
    "mellum": IN_TURNS,
    "minimax_m3_vl_text": dict(layer_types=["minimax_m3_sparse", "full_attention"] * (BLOCKS // 2)),
    "ministral": dict(head_dim=HEAD),
    "reformer": dict(axial_pos_embds_dim=(HEAD, HIDDEN - HEAD)),
}
TEXT = dict(model_type="gemma4_text", hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)
# Whose defaults cannot be built, or not be shrunk
WITHOUT_DEFAULTS: dict[str, dict[str, Any]] = {"gemma4_assistant": dict(text_config=TEXT), "zamba2": {}, "zaya": {}}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The zoo's first config of this type, or the default one with every size that ``SIZES`` names made small."""
    config_class = CONFIG_MAPPING[model_type]
    for known, arguments in CONFIGS.values():
        if known == model_type:
            return config_class(**arguments)
    if model_type in WITHOUT_DEFAULTS:
        return config_class(**WITHOUT_DEFAULTS[model_type])
    defaults = vars(config_class())
    arguments = {name: size for name, size in SIZE_OF.items() if type(defaults.get(name)) is int}
    if "kv_lora_rank" in arguments:  # latent attention
        arguments["num_key_value_heads"] = HEADS
        if defaults.get("head_dim") == defaults["qk_rope_head_dim"]:  # where they are two names of one size
            arguments["head_dim"] = arguments["qk_rope_head_dim"]
    return config_class(**{**arguments, **TOKENS, **BESIDES.get(model_type, {})})
