"""What follows from a family and a config without any model being built."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import BloomConfig, LlamaConfig, MptConfig, OpenAIGPTConfig, PreTrainedConfig

from swarm_models.checkpoints.family import Family, max_positions, rope_depends_on_length, slice_config
from swarm_protocol.span import Span
from tests.zoo import BLOCKS, make_config

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=2.0)
DYNAMIC = dict(YARN, rope_type="dynamic")
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0], long_factor=[2.0])


def family(model_type: str = "llama", owner: str = "", cache_argument: str = "past_key_values") -> Family:
    """Of a model with three blocks."""
    return Family(
        model_type=model_type,
        base_class=nn.Module,
        owner=owner,
        blocks="layers",
        embedding="embed_tokens",
        positions=(),
        identities=("norm",),
        neutral=(),
        returns_tuple=False,
        takes_positions=True,
        position_axes=1,
        cache_argument=cache_argument,
        mask_covers_past=True,
        num_blocks=3,
        hidden_size=8,
        block_parameters=(5, 5, 7),
        linears=((), (), ()),
    )


@pytest.mark.parametrize(
    ("name", "index", "rest"),
    [
        ("model.layers.3.self_attn.q_proj.weight", 3, "self_attn.q_proj.weight"),
        ("layers.12.mlp.experts.4.w1.weight", 12, "mlp.experts.4.w1.weight"),
        ("model.language_model.layers.0.input_layernorm.weight", 0, "input_layernorm.weight"),
        ("model.embed_tokens.weight", None, "model.embed_tokens.weight"),
        ("lm_head.weight", None, "lm_head.weight"),
        ("model.my_layers.3.weight", None, "model.my_layers.3.weight"),
    ],
)
def test_names_in_a_checkpoint(name: str, index: int | None, rest: str) -> None:
    assert (family().block_index(name), family().name_in_block(name)) == (index, rest)


def test_how_the_cache_is_given_to_a_model() -> None:
    cache = object()
    assert family().cache_arguments(cache, True) == {"past_key_values": cache, "use_cache": True}
    assert family(cache_argument="cache_params").cache_arguments(None, False) == {
        "cache_params": None,
        "use_cache": False,
    }
    # It would insist on a cache class of its own.
    assert family("minimax").cache_arguments(cache, True) == {"past_key_values": cache, "use_cache": False}


def test_slice_config_cuts_every_list_per_block() -> None:
    config = make_config("llama4_text")
    sliced = slice_config(config, Span(1, 4))
    assert sliced.num_hidden_layers == 3 and config.num_hidden_layers == BLOCKS
    assert sliced.layer_types == config.layer_types[1:4]
    assert sliced.no_rope_layers == config.no_rope_layers[1:4]
    gpt_neo = slice_config(make_config("gpt_neo", eos_token_id=[1, 2, 3, 4, 5, 6]), Span(1, 4))
    assert gpt_neo.attention_layers == ["local", "global", "local"]
    assert gpt_neo.eos_token_id == [1, 2, 3, 4, 5, 6]


def test_slice_config_cuts_lists_that_are_computed() -> None:
    config = make_config("jamba")
    assert slice_config(config, Span(1, 4)).layer_types == config.layer_types[1:4]
    assert slice_config(config, Span(1, 4)).layers_block_type == config.layers_block_type[1:4]
    config = make_config("gemma4_unified_text")
    one_block = slice_config(config, Span(0, 1))
    one_block.layer_types = config.layer_types  # as a client has them
    assert getattr(one_block, "kv_sharing_modes", [None]) == [None]  # some versions have it


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (LlamaConfig(max_position_embeddings=77), 77),
        (OpenAIGPTConfig(n_positions=55), 55),
        (MptConfig(max_seq_len=66), 66),
        (BloomConfig(), None),
        (make_config("falcon-rw"), None),  # alibi, though its config has a number
    ],
    ids=["llama", "openai-gpt", "mpt", "bloom", "falcon-rw"],
)
def test_the_longest_sequence_a_model_was_made_for(config: PreTrainedConfig, limit: int | None) -> None:
    assert max_positions(config) == limit


@pytest.mark.parametrize(
    ("rope", "depends"),
    [
        (None, False),
        (YARN, False),
        (DYNAMIC, True),
        (LONG, True),
        (dict(full_attention=YARN, sliding_attention=YARN), False),
        (dict(full_attention=DYNAMIC, sliding_attention=YARN), True),
        (dict(type="dynamic"), True),  # as older configs call it
    ],
)
def test_rotary_embeddings_that_depend_on_the_length(rope: dict | None, depends: bool) -> None:
    config = PreTrainedConfig()
    config.rope_parameters = rope
    assert rope_depends_on_length(config) is depends
