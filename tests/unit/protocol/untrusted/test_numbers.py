"""Numbers of configs: all that real models have pass, and what nothing can be built from is refused with a sentence."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from swarm_protocol.errors import CheckpointError
from swarm_protocol.untrusted.numbers import Expected, require_finite, require_model_numbers, require_number
from tests.zoo import CONFIGS, make_config

PATH = Path("model/config.json")
NO_DEFAULT = {"gemma4_assistant"}  # transformers itself refuses it
CAUSAL = sorted({config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING} & set(CONFIG_MAPPING) - NO_DEFAULT)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_what_transformers_itself_writes_passes(model_type: str) -> None:
    config_class = CONFIG_MAPPING[model_type]
    config = config_class()
    require_model_numbers(json.loads(config.to_json_string(use_diff=False)), PATH, config_class.attribute_map)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_supported_families_pass(name: str) -> None:
    config = make_config(name)
    require_model_numbers(json.loads(config.to_json_string(use_diff=False)), PATH, config.attribute_map)


WRONG = {
    "no blocks": (
        dict(num_hidden_layers=0),
        r"num_hidden_layers=0: expected a whole number of at least 1, at most 4096",
    ),
    "very many blocks": (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000: expected a whole number"),
    "width": (dict(hidden_size=1 << 40), "hidden_size=1099511627776: expected a whole number"),
    "heads": (dict(num_attention_heads=0), "num_attention_heads=0: expected a whole number of at least 1"),
    "heads of keys": (dict(num_key_value_heads=-4), "num_key_value_heads=-4: expected a whole number of at least 1"),
    "heads of a block": (dict(num_key_value_heads=[4, -4]), "num_key_value_heads=-4: expected a whole number"),
    "head": (dict(head_dim=-16), "head_dim=-16: expected a whole number of at least 0"),
    "inner width": (dict(intermediate_size=1e9), r"intermediate_size=1000000000\.0: expected a whole number"),
    "vocabulary": (dict(vocab_size="many"), "vocab_size='many': expected a whole number"),
    "positions": (dict(max_position_embeddings=-1), "max_position_embeddings=-1: expected a whole number"),
    "experts": (dict(num_local_experts=10**8), "num_local_experts=100000000: expected a whole number"),
    "window": (dict(sliding_window=-8), "sliding_window=-8: expected a whole number"),
    "no eps": (dict(rms_norm_eps=0), "rms_norm_eps=0: expected a number above 0, at most 1"),
    "disguised": (dict(rms_norm_eps={"__float__": "Infinity"}), "rms_norm_eps=inf: expected a number above 0"),
    "base": (dict(rope_theta=0), "rope_theta=0: expected a number above 0"),
    "infinite base": (dict(rope_parameters={"rope_theta": inf}), "rope_theta=inf: expected a number above 0"),
    "factor": (dict(rope_scaling={"factor": -8.0}), r"factor=-8\.0: expected a number above 0"),
    "nested": (dict(rope_parameters={"full_attention": {"factor": nan}}), "factor=nan: expected a number above 0"),
    "factors": (dict(rope_scaling={"long_factor": [1.0, inf]}), "long_factor=inf: expected a number above 0"),
    "first length": (dict(original_max_position_embeddings=0), "original_max_position_embeddings=0: expected a whole"),
    "dropout": (dict(attention_dropout=2), "attention_dropout=2: expected a number of at least 0, at most 1"),
    "NaN anywhere": (dict(final_logit_softcapping=nan), "final_logit_softcapping=nan: expected a finite number"),
    "infinity anywhere": (dict(whatever=[[-inf]]), "whatever=-inf: expected a finite number"),
    "too large to be a float": (dict(whatever=10**400), r"whatever=10{59}…: expected a finite number"),
    "unprintable": ({"a\nb": nan}, r"'a\\nb'=nan: expected a finite number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    config, sentence = WRONG[name]
    with pytest.raises(CheckpointError, match=rf"^model/config\.json has {sentence}"):
        require_model_numbers(config, PATH, {})


def test_a_familys_own_name_is_the_one_in_the_error() -> None:
    with pytest.raises(CheckpointError, match="has n_layer=0: expected a whole number of at least 1"):
        require_model_numbers({"n_layer": 0}, PATH, CONFIG_MAPPING["gpt2"].attribute_map)


def test_what_stands_for_a_default_or_for_no_limit_passes() -> None:
    config = {"head_dim": None, "sliding_window": None, "time_step_limit": [0.0, inf], "mamba_dt_rank": "auto"}
    require_model_numbers(config, PATH, {})


def test_only_finite_numbers() -> None:
    require_finite({"temperature": 0.7, "nested": {"top_k": -1}, "names": ["a", None, True]}, PATH)
    with pytest.raises(CheckpointError, match="has top_p=nan: expected a finite number"):
        require_finite({"nested": [{"top_p": nan}]}, PATH)


@pytest.mark.parametrize(
    ("expected", "admitted", "text"),
    [
        (Expected(0, 1), [0, 0.5, 1, 1.0], "a number of at least 0, at most 1"),
        (Expected(0, 1, above=True), [0.5, 1, 1.0], "a number above 0, at most 1"),
        (Expected(0, 1, below=True), [0, 0.5], "a number of at least 0, below 1"),
        (Expected(0, 1, whole=True), [0, 1], "a whole number of at least 0, at most 1"),
    ],
)
def test_what_is_expected(expected: Expected, admitted: list[float], text: str) -> None:
    values = [-1, 0, 0.5, 1, 1.0, 2, inf, -inf, nan, None, True, False, "1", [1], {}]
    assert [value for value in values if expected.admits(value)] == admitted
    with pytest.raises(CheckpointError, match=f"has key=7: expected {text}"):
        require_number(7, expected, PATH, "key")
