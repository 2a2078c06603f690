"""Caches with grad mode on: the local model's tokens and gradients, or a refusal, never gradients that are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from swarm_client import RequestRejected
from tests.swarm.pair import random_ids
from tests.swarm.tuning import assert_close, lora, loss_of, padded_batch, trained, tuned

SPANS = ("0:2", "2:6")

NEW_TOKENS = 6
REFUSED = "gradients do not flow through a cache.*use_cache=False"
BATCH = padded_batch()


def decode_loop(model: PreTrainedModel, ids: torch.Tensor, past: Any = None, **options: Any) -> list[int]:
    """Greedy tokens, as people write it who forget about grad mode."""
    tokens = []
    for _ in range(NEW_TOKENS):
        out = model(ids, past_key_values=past, **options)
        past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


CACHES: dict[str, tuple[Callable[[PreTrainedModel], Any], dict[str, Any]]] = {
    "asked-for": (lambda _model: None, {"use_cache": True}),
    "by-default": (lambda _model: None, {}),
    "dynamic": (lambda _model: DynamicCache(), {"use_cache": True}),
    "dynamic-alone": (lambda _model: DynamicCache(), {}),
    "remote": (lambda model: model.new_cache() if hasattr(model, "new_cache") else None, {"use_cache": True}),
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [*((name, False) for name in CACHES), ("asked-for", True), ("dynamic", True)],
)
def test_a_decode_loop_writes_the_local_models_tokens(pair, name, frozen):
    make, options = CACHES[name]
    ids = random_ids(1, 9, seed=4)
    tokens = []
    for model in (pair.whole, pair.remote):
        model.requires_grad_(not frozen)
        tokens.append(decode_loop(model, ids, make(model), **options))
        model.requires_grad_(True)
    assert tokens[1] == tokens[0]


def test_a_first_pass_that_could_be_trained_gives_a_cache_to_go_on_with(pair, steps):
    ids, more = random_ids(2, 9, seed=5), random_ids(2, 2, seed=6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    logits, events = [], []
    for model in (pair.whole, pair.remote):
        past = None if model is pair.whole else model.new_cache(on_event=events.append)
        past = model(ids, attention_mask=mask, past_key_values=past, use_cache=True).past_key_values
        assert past.get_seq_length() == 9 and steps == []
        if past is not None:
            past.crop(-2)
            past.reorder_cache(torch.tensor([1, 0]))
        whole_mask = torch.cat([mask[[1, 0], :7], torch.ones_like(more)], 1)
        with torch.no_grad():
            logits.append(model(more, attention_mask=whole_mask, past_key_values=past).logits)
    assert_close(logits[1], logits[0])
    assert steps == [2] and events == []


@pytest.mark.parametrize("name", CACHES)
def test_all_parameters_get_their_gradients_beside_an_empty_cache(pair, steps, name):
    make, options = CACHES[name]
    grads = []
    for model in (pair.whole, pair.remote):
        model.zero_grad()
        out = model(**BATCH, past_key_values=make(model), **options)
        assert out.past_key_values.get_seq_length() == BATCH["input_ids"].shape[1]
        out.loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert len(grads[1]) == 3 and steps == []
    for name, grad in grads[1].items():
        assert_close(grad, grads[0][name])
    pair.servers.wait_until_all_room_is_free()


def test_a_backward_pass_through_a_filled_cache_is_refused(pair):
    with torch.no_grad():
        past = pair.remote(**BATCH).past_key_values
    more = random_ids(3, 2, seed=9)
    mask = torch.cat([BATCH["attention_mask"], torch.ones_like(more)], 1)
    out = pair.remote(more, attention_mask=mask, past_key_values=past, labels=more)
    with pytest.raises(RequestRejected, match=REFUSED):
        out.loss.backward()


def test_a_cache_keeps_the_adapter_that_it_was_begun_with(pair):
    """As the local model's keys and values are those of then."""
    more = random_ids(3, 2, seed=9)
    mask = torch.cat([BATCH["attention_mask"], torch.ones_like(more)], 1)
    with tuned(pair.servers, lora()) as both:
        both.train(2, loss_of(**BATCH))
        out = both.remote(**BATCH)
        with torch.no_grad():
            expected = both.remote(more, attention_mask=mask, past_key_values=both.remote(**BATCH).past_key_values)
            for parameter in trained(both.remote):
                parameter.mul_(2)
            found = both.remote(more, attention_mask=mask, past_key_values=out.past_key_values)
    assert_close(found.logits, expected.logits)


def test_without_a_cache_there_is_none(pair, steps):
    assert pair.remote(**BATCH, use_cache=False).past_key_values is None
    pair.remote.config.use_cache = False
    try:
        with torch.no_grad():
            assert pair.remote(**BATCH).past_key_values is None
    finally:
        pair.remote.config.use_cache = True
    assert steps == []
