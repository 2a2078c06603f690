"""Logits processors against closed formulas, and what becomes of a model's own generation config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from swarm_gateway.generation.requests import CompletionRequest
from swarm_gateway.generation.sampling import LogitBias, Penalties, generation_config


def test_penalties_are_those_of_openai() -> None:
    """``logit - count * frequency - (count > 0) * presence``, of generated tokens alone."""
    scores = torch.tensor([[1.0, -2.0, 3.0, 0.5]])
    ids = torch.tensor([[3, 3, 0, 2, 0, 0]])  # the first two are the prompt
    penalized = Penalties(num_prompt=2, presence=0.25, frequency=0.5)(ids, scores)
    assert penalized.tolist() == [[1.0 - 3 * 0.5 - 0.25, -2.0, 3.0 - 0.5 - 0.25, 0.5]]
    assert scores.tolist() == [[1.0, -2.0, 3.0, 0.5]]


def test_bias_is_added() -> None:
    scores = torch.zeros(1, 4)
    assert LogitBias({2: 5.0, 0: -100.0})(torch.tensor([[1]]), scores).tolist() == [[-100.0, 0.0, 5.0, 0.0]]
    assert not scores.any()


def config(own: dict[str, Any], **fields: Any) -> tuple[Any, ...]:
    asked = CompletionRequest(model="m", prompt="p", **fields)
    found = generation_config(asked, GenerationConfig(**own))
    return found.do_sample, found.temperature, found.top_p, found.top_k


@pytest.mark.parametrize(
    ("own", "fields", "found"),
    [
        ({}, {}, (True, 1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": 20}, {}, (True, 0.6, 0.9, 20)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 1, "top_k": 0}, (True, 1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0}, (False, None, None, None)),
        ({"do_sample": False}, {}, (False, None, None, None)),
        ({"do_sample": False}, {"temperature": 0.5}, (True, 0.5, 1.0, 0)),
    ],
)
def test_the_request_counts_then_the_model_then_openai(own: Any, fields: Any, found: Any) -> None:
    assert config(own, **fields) == found


def test_the_models_own_config_stays() -> None:
    own = GenerationConfig(eos_token_id=7, temperature=0.6)
    asked = CompletionRequest(model="m", prompt="p", temperature=0.1, repetition_penalty=1.2)
    changed = generation_config(asked, own)
    assert (changed.eos_token_id, changed.repetition_penalty) == (7, 1.2)
    assert (own.temperature, own.repetition_penalty) == (0.6, GenerationConfig().repetition_penalty)
