"""What is read off each family, and which models are refused with which reason."""

from __future__ import annotations

import pytest
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    DeepseekV4Config,
    Gemma3Config,
    GraniteMoeConfig,
    HYV4Config,
    LlamaConfig,
    LongcatFlashConfig,
    OpenAIGPTConfig,
    PreTrainedConfig,
    T5Config,
    ZayaConfig,
)

from swarm_models.checkpoints.describing import describe
from swarm_protocol.errors import UnsupportedModel
from swarm_protocol.span import Span
from tests.marks import SLOW
from tests.zoo import BLOCKS, HIDDEN, REJECTED, SUPPORTED, make_config

SMALL = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)


def test_facts_of_llama() -> None:
    family = describe(make_config("llama"))
    assert (family.owner, family.blocks, family.embedding) == ("", "layers", "embed_tokens")
    assert (family.positions, family.identities, family.neutral) == ((), ("norm",), ())
    assert (family.num_blocks, family.hidden_size, family.all_blocks) == (BLOCKS, HIDDEN, Span(0, BLOCKS))
    assert len(set(family.block_parameters)) == 1 and len(family.block_parameters) == BLOCKS


def test_facts_of_opt_with_projections() -> None:
    family = describe(make_config("opt-projected"))
    assert (family.owner, family.blocks, family.embedding) == ("decoder", "layers", "embed_tokens")
    assert family.positions == ("embed_positions",)
    assert set(family.identities) == {"project_in", "project_out"}
    assert family.hidden_size == HIDDEN


@SLOW
def test_which_families_return_tuples() -> None:
    tuples = {name for name in SUPPORTED if describe(make_config(name)).returns_tuple}
    # gptj returned tuples until transformers 5.23
    assert tuples - {"gptj"} == {
        "bamba",
        "bloom",
        "falcon-rw",
        "falcon-7b",
        "falcon-40b",
        "falcon_h1",
        "glm_moe_dsa",
        "gpt_neo",
        "mpt",
    }


@SLOW
def test_which_families_mask_new_tokens_alone() -> None:
    alone = {name for name in SUPPORTED if not describe(make_config(name)).mask_covers_past}
    assert alone == {"mamba", "falcon_mamba", "mamba2"}


def test_families_outside_the_list_are_tried() -> None:
    config = GraniteMoeConfig(**SMALL, num_key_value_heads=2, embedding_multiplier=3.0)
    assert describe(config).neutral == (("embedding_multiplier", 1.0),)


class HomeMadeConfig(PreTrainedConfig):
    model_type = "home-made"
    num_hidden_layers = 2


REFUSED = {
    "gemma3n_text": (make_config("gemma3n_text"), "share keys, values or embeddings"),
    "gemma4_text": (make_config("gemma4_text"), "share keys, values or embeddings"),
    "recurrent_gemma": (make_config("recurrent_gemma"), "keep their recurrent state in themselves"),
    "longcat_flash": (LongcatFlashConfig(), "attends twice"),
    "deepseek_v4": (DeepseekV4Config(), "keep tokens that are not compressed yet"),
    "glm_moe_dsa": (make_config("glm_moe_dsa", index_topk_freq=3), "hand one another the positions"),
    "hy_v4": (HYV4Config(), "several streams of hidden states"),
    "zaya": (ZayaConfig(), "hand one another more than hidden states"),
    "t5": (T5Config(), "encoder-decoder"),
    "gemma3": (Gemma3Config(), "wraps a text model"),
    "bert": (BertConfig(**SMALL), "token embedding is not beside"),
    "openai-gpt": (OpenAIGPTConfig(n_layer=2, n_embd=64, n_head=4), "does not accept use_cache, a Cache"),
    "llama": (LlamaConfig(**SMALL, hidden_act="nonsense"), "cannot build it from this config"),
    "home-made": (HomeMadeConfig(), "no stock model"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_with_the_reason(model_type: str) -> None:
    config, reason = REFUSED[model_type]
    with pytest.raises(
        UnsupportedModel, match=f"models of type '{model_type}' cannot be split into blocks: .*{reason}"
    ):
        describe(config)


def test_blocks_that_reuse_the_keys_of_others_are_refused() -> None:
    """Nothing would be stored of them, not even the keys of their index."""
    if "mistral_large4_text" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    make = CONFIG_MAPPING["mistral_large4_text"]
    with pytest.raises(UnsupportedModel, match="share keys, values or embeddings"):
        describe(make(num_hidden_layers=4, kv_source_layers=[0, 0, 2, 2]))
    assert describe(make(num_hidden_layers=4)).num_blocks == 4


def test_an_unknown_multiplier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_models.checkpoints.describing.NEUTRAL_ATTRIBUTES", {})
    with pytest.raises(UnsupportedModel, match="changes hidden states outside its blocks"):
        describe(make_config("granite", embedding_multiplier=7.0))


def test_every_rejected_zoo_member_is_refused() -> None:
    assert set(REJECTED) <= set(REFUSED)
