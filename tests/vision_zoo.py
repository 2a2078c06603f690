"""Tiny random models that see: one of each kind of positions, of names and of vision towers, with random pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from tests.zoo import BLOCKS, EXPERTS, HIDDEN, INITIALIZER_RANGE, PAD, SLIDING, SMALL_HEADS

VOCAB = 256
PICTURE, VIDEO, BEFORE_PICTURE, AFTER_PICTURE = 250, 251, 252, 253  # token ids
NUM_WORDS = 240  # token ids below are words
SIDE, PATCH = 28, 7  # pixels; pictures of 4 × 4 patches, of which each 2 × 2 become one token
TOKENS_PER_PICTURE = 4
FIRST_PICTURE_TOKEN = 5

VISION = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
SQUARE = dict(VISION, image_size=SIDE, patch_size=PATCH)
QWEN_VISION = dict(num_heads=2, patch_size=PATCH, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
DEEP_VISION = dict(
    QWEN_VISION,
    depth=4,
    hidden_size=32,
    intermediate_size=64,
    out_hidden_size=HIDDEN,
    deepstack_visual_indexes=[0, 1, 3],  # added after more blocks than the first server of some tests has
    num_position_embeddings=(SIDE // PATCH) ** 2,
)
QWEN = dict(video_token_id=VIDEO, vision_start_token_id=BEFORE_PICTURE, vision_end_token_id=AFTER_PICTURE)
ALTERNATING = dict(sliding_window=SLIDING, layer_types=["sliding_attention", "full_attention"] * (BLOCKS // 2))
SHORT_WINDOW = dict(sliding_window=TOKENS_PER_PICTURE - 1)  # a picture is longer
PALIGEMMA = dict(
    vision_config=dict(VISION, model_type="siglip_vision_model", image_size=SIDE, patch_size=SIDE // 2),
    image_token_index=PICTURE,
    projection_dim=HIDDEN,
    hidden_size=HIDDEN,
)


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **SMALL_HEADS, "vocab_size": VOCAB, **more}


def _axes(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


def _pixels(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def _square(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(rows, 3, SIDE, SIDE)}


def _several(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": _pixels(rows, 1, 3, SIDE, SIDE)}


def _sized(rows: int) -> dict[str, torch.Tensor]:
    return {**_square(rows), "image_sizes": torch.tensor([[SIDE, SIDE]] * rows)}


def _patches(rows: int) -> dict[str, torch.Tensor]:
    side = SIDE // PATCH
    return {
        "pixel_values": _pixels(rows * side**2, 3 * 2 * PATCH**2),
        "image_grid_thw": torch.tensor([[1, side, side]] * rows),
    }


# Of each type: arguments of its config, and the arguments of ``forward`` that hold one picture for each row.
MODELS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, torch.Tensor]]]] = {
    "llava": (
        dict(
            text_config=_text("llama"),
            vision_config=dict(VISION, model_type="clip_vision_model", image_size=SIDE, patch_size=SIDE // 2),
            image_token_index=PICTURE,
        ),
        _square,
    ),
    "mistral3": (
        dict(
            text_config=_text("mistral", sliding_window=None),
            vision_config=dict(SQUARE, model_type="pixtral", head_dim=16),
            image_token_index=PICTURE,
        ),
        _sized,
    ),
    "internvl": (
        dict(
            text_config=_text("qwen2"),
            vision_config=dict(VISION, model_type="internvl_vision", image_size=[SIDE] * 2, patch_size=[PATCH] * 2),
            image_token_id=PICTURE,
        ),
        _square,
    ),
    "idefics3": (
        dict(
            text_config=_text("llama"),
            vision_config=dict(SQUARE, model_type="idefics3_vision"),
            image_token_id=PICTURE,
            scale_factor=2,
        ),
        _several,
    ),
    "smolvlm": (
        dict(
            text_config=_text("llama"),
            vision_config=dict(SQUARE, model_type="smolvlm_vision"),
            image_token_id=PICTURE,
            scale_factor=2,
        ),
        _several,
    ),
    "llama4": (
        dict(
            text_config=_text(
                "llama4_text", intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=SLIDING
            ),
            vision_config=dict(
                SQUARE,
                model_type="llama4_vision_model",
                intermediate_size=128,
                vision_output_dim=48,
                projector_input_dim=48,
                projector_output_dim=48,
            ),
            image_token_index=PICTURE,
        ),
        _square,
    ),
    "aya_vision": (
        dict(
            text_config=_text("cohere2", **ALTERNATING),
            vision_config=dict(SQUARE, model_type="siglip_vision_model"),
            image_token_index=PICTURE,
            vision_feature_layer=-1,
            downsample_factor=2,
            alignment_intermediate_size=64,
        ),
        _square,
    ),
    "qwen2_vl": (
        dict(
            text_config=_text("qwen2_vl_text", **_axes(2, 3, 3)),
            vision_config=dict(QWEN_VISION, depth=3, embed_dim=32, hidden_size=HIDDEN, mlp_ratio=2),
            image_token_id=PICTURE,
            **QWEN,
        ),
        _patches,
    ),
    "qwen2_5_vl": (
        dict(
            text_config=_text("qwen2_5_vl_text", **_axes(2, 3, 3)),
            vision_config=dict(
                QWEN_VISION,
                depth=3,
                hidden_size=32,
                intermediate_size=64,
                out_hidden_size=HIDDEN,
                window_size=SIDE,
                fullatt_block_indexes=[1],
            ),
            image_token_id=PICTURE,
            **QWEN,
        ),
        _patches,
    ),
    "gemma3": (
        dict(
            text_config=_text("gemma3_text", query_pre_attn_scalar=16, **ALTERNATING | SHORT_WINDOW),
            vision_config=dict(SQUARE, model_type="siglip_vision_model"),
            image_token_index=PICTURE,
            mm_tokens_per_image=TOKENS_PER_PICTURE,
        ),
        _square,
    ),
    "paligemma": (
        dict(PALIGEMMA, text_config=_text("gemma")),
        _square,
    ),
    "paligemma-2": (
        dict(PALIGEMMA, text_config=_text("gemma2", query_pre_attn_scalar=16, **ALTERNATING | SHORT_WINDOW)),
        _square,
    ),
    "qwen3_vl": (
        dict(
            text_config=_text("qwen3_vl_text", **_axes(4, 2, 2)),
            vision_config=DEEP_VISION,
            image_token_id=PICTURE,
            **QWEN,
        ),
        _patches,
    ),
    "qwen3_vl_moe": (
        dict(
            text_config=_text("qwen3_vl_moe_text", **EXPERTS, **_axes(4, 2, 2)),
            vision_config=DEEP_VISION,
            image_token_id=PICTURE,
            **QWEN,
        ),
        _patches,
    ),
}
SEEING = tuple(MODELS)
BOTH_WAYS = ("gemma3", "paligemma", "paligemma-2")  # positions of a picture, or of the whole prompt, see later ones
NUM_SUFFIX = 2  # tokens that a PaliGemma is to learn to write


def save_seeing(name: str, directory: Path) -> None:
    """Write a random checkpoint of a model of this type."""
    arguments, _ = MODELS[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name.partition("-")[0]](**arguments))
        for parameter in model.parameters():
            if parameter.dim() > 1 or not parameter.any():
                nn.init.normal_(parameter, std=INITIALIZER_RANGE)
    model.generation_config.update(eos_token_id=None, pad_token_id=PAD)
    model.save_pretrained(directory, max_shard_size="400KB")


def load_seeing(directory: Path) -> PreTrainedModel:
    """The whole model on this machine."""
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def words(rows: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, NUM_WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def with_text(name: str, length: int) -> dict[str, torch.Tensor]:
    """Arguments of ``forward``: words in one row. A PaliGemma's row is padded: without, it never hides later words."""
    ids = words(1, length)
    if not name.startswith("paligemma"):
        return {"input_ids": ids}
    ids[:, :2] = PAD
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "token_type_ids": torch.zeros_like(ids)}


def with_pictures(name: str, rows: int, per_row: int = 1) -> dict[str, torch.Tensor]:
    """Arguments of ``forward``: words, pictures and words in each row; with several rows, the first is padded."""
    apart = FIRST_PICTURE_TOKEN + TOKENS_PER_PICTURE
    ids = words(rows, per_row * apart + 6)
    for first in range(FIRST_PICTURE_TOKEN, per_row * apart, apart):
        ids[:, first - 1] = BEFORE_PICTURE
        ids[:, first : first + TOKENS_PER_PICTURE] = PICTURE
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :2], mask[0, :2] = PAD, 0
    given = {"input_ids": ids, "attention_mask": mask, **MODELS[name][1](rows * per_row)}
    if name.startswith("qwen"):
        given["mm_token_type_ids"] = (ids == PICTURE).long()
    elif name == "gemma3":
        given["token_type_ids"] = (ids == PICTURE).long()
    elif name.startswith("paligemma"):
        given["token_type_ids"] = torch.zeros_like(ids)
        given["token_type_ids"][:, -NUM_SUFFIX:] = 1
    return given
