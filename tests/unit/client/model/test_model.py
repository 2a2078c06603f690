"""What ``from_pretrained`` refuses before it asks anybody."""

from __future__ import annotations

import re

import pytest
from transformers import LlamaConfig

from swarm_client import ClientConfig, DistributedModel


@pytest.mark.parametrize(
    "beside",
    [
        {"wait_timeout_s": 30.0},  # even if it says the same
        {"initial_peers": []},
    ],
)
def test_config_and_one_of_its_fields(beside):
    (name,) = beside
    with pytest.raises(ValueError, match=f"^config and {name} are both given"):
        DistributedModel.from_pretrained(config=ClientConfig(), **beside)


@pytest.mark.parametrize("config", [LlamaConfig(), {"swarm": "mine"}, "mine"])
def test_config_is_not_that_of_the_model(config):
    sentence = f"config is a {type(config).__name__}: expected a swarm_client.ClientConfig. Fields of the model's own"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DistributedModel.from_pretrained(config=config)


@pytest.mark.parametrize(
    ("keyword", "sentence"),
    [
        ({"wait_timeout_s": -1}, "wait_timeout_s is -1: expected a number of seconds"),
        ({"allowed_servers": "abc"}, "allowed_servers is a string: expected a list of peer ids"),
    ],
)
def test_keywords_are_checked_like_fields(keyword, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DistributedModel.from_pretrained(**keyword)
