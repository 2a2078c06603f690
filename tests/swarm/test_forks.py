"""Caches that are copied, and the kinds of cache that ``generate`` is asked for, as a stock model takes them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

from swarm_client import RequestRejected
from swarm_client.core.events import Event
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.engine.engine import Engine
from tests.swarm.pair import NEW_TOKENS, connected, random_ids
from tests.swarm.tuning import lora

SPANS = ("0:3", "3:6")

SHARED = 3 * PAGE_TOKENS
OPTIONS = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


def continued(beginning: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.cat([beginning, random_ids(len(beginning), 7, seed=100 + seed)], 1)


def prefilled(model, ids: torch.Tensor, cache, **inputs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True, **inputs).past_key_values


@pytest.mark.parametrize(
    "make",
    [lambda _config: DynamicCache(), lambda config: DynamicCache(config=config), lambda c: StaticCache(c, 128)],
    ids=["dynamic", "dynamic-of-config", "static"],
)
def test_a_shared_prompt_is_continued_in_several_ways(pair, make, monkeypatch):
    """The recipe of the transformers documentation: the prompt is computed once, each continuation has a copy."""
    shared = random_ids(1, SHARED, seed=0)
    events: list[Event] = []
    computed: list[int] = []
    run_part = Engine._run_part

    def counted(engine: Engine, blocks, batch, hidden):
        computed.extend(one.shape[1] for one in hidden if one.shape[1] > 1)
        return run_part(engine, blocks, batch, hidden)

    monkeypatch.setattr(Engine, "_run_part", counted)
    with connected(pair.servers, on_event=events.append) as remote:
        answers = {}
        for model in (pair.whole, remote):
            cache = prefilled(model, shared, make(model.config))
            computed.clear()
            answers[model] = [
                model.generate(continued(shared, seed), past_key_values=copy.deepcopy(cache), **OPTIONS)
                for seed in range(3)
            ]
            assert cache.get_seq_length() == SHARED
        assert all(map(torch.equal, answers[remote], answers[pair.whole]))
        assert events == []  # nothing was recovered
        assert sum(computed) <= 2 * 3 * 7 + 2 * PAGE_TOKENS  # servers have the prompt


def test_a_copy_with_padding_rows_in_another_order_and_fewer_positions(pair):
    ids = random_ids(3, 20, seed=2)
    mask = torch.ones_like(ids)
    ids[1, :6], mask[1, :6] = 0, 0
    logits = {}
    for model in (pair.whole, pair.remote):
        cache = prefilled(model, ids, DynamicCache(), attention_mask=mask)
        cache.reorder_cache(torch.tensor([2, 1, 1]))
        cache.crop(-4)
        fork = copy.deepcopy(cache)
        later = mask[[2, 1, 1], :17]
        found = []
        for one, seed in ((fork, 3), (cache, 4)):
            with torch.no_grad():
                found.append(
                    model(random_ids(3, 1, seed), attention_mask=later, past_key_values=one, use_cache=True).logits
                )
        logits[model] = found
    for remote, whole in zip(logits[pair.remote], logits[pair.whole], strict=True):
        torch.testing.assert_close(remote, whole, atol=1e-5, rtol=1e-5)


def test_a_copy_of_an_empty_cache(pair):
    ids = random_ids(1, 9, seed=5)
    cache = pair.remote.new_cache()
    fork = copy.deepcopy(cache)
    assert fork.session is not cache.session
    assert torch.equal(pair.remote.generate(ids, past_key_values=fork, **OPTIONS), pair.whole.generate(ids, **OPTIONS))
    assert cache.get_seq_length() == 0


def test_a_copy_keeps_the_adapter_that_its_session_began_with(pair):
    ids = random_ids(1, 12, seed=6)
    with connected(pair.servers) as remote, torch.no_grad():
        remote.add_adapter(lora(init_lora_weights=False))
        tuned = remote(ids).logits
        cache = prefilled(remote, ids[:, :8], DynamicCache())
        remote.disable_adapters()
        found = remote(ids[:, 8:], past_key_values=copy.deepcopy(cache), use_cache=True).logits
    torch.testing.assert_close(found, tuned[:, 8:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, pair.whole(ids).logits[:, 8:], atol=1e-3)


def test_what_cannot_be_copied_says_so(pair):
    cache = prefilled(pair.remote, random_ids(1, 5, seed=7), DynamicCache())
    with pytest.raises(TypeError, match="keys and values on servers cannot be pickled"):
        pickle.dumps(cache)
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="a distributed model cannot be copied or pickled: from_pretrained"):
            copying(pair.remote)


# ------------------------------------------------------------ kinds of cache


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        *(("argument", kind) for kind in ("dynamic", "static", "offloaded", "offloaded_static", "hybrid")),
        ("config", "static"),
    ],
)
def test_kinds_of_cache_that_change_no_token(pair, kind, where):
    ids = random_ids(2, 11, seed=8)
    options = dict(OPTIONS)
    if where == "config":
        options["generation_config"] = copy.deepcopy(pair.remote.generation_config)
        options["generation_config"].cache_implementation = kind
    else:
        options["cache_implementation"] = kind
    found = pair.remote.generate(ids, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, pair.whole.generate(ids, **OPTIONS))
    assert found.past_key_values.session.length == ids.shape[1] + NEW_TOKENS - 1
    assert where == "argument" or options["generation_config"].cache_implementation == kind


@pytest.mark.parametrize(
    ("kind", "message"),
    [("quantized", "'quantized' rounds keys and values .* leave it out"), ("paged", "call generate with a batch")],
)
def test_kinds_of_cache_that_servers_do_not_have(pair, kind, message):
    with pytest.raises(RequestRejected, match=message):
        pair.remote.generate(random_ids(1, 5, seed=9), cache_implementation=kind, **OPTIONS)


# ------------------------------------------------------------ other precisions


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_client_in_half_precision(pair, dtype):
    with connected(pair.servers) as remote, torch.no_grad():
        remote.to(dtype)
        logits = remote(random_ids(1, 9, seed=10)).logits
        expected = pair.whole(random_ids(1, 9, seed=10)).logits
    assert logits.dtype is dtype
    assert float((logits.float() - expected).norm() / expected.norm()) < 0.02


def test_a_precision_that_servers_do_not_know(pair):
    with (
        connected(pair.servers) as remote,
        pytest.raises(RequestRejected, match=r"float64 cannot be sent .* float32, bf"),
    ):
        remote.double()(random_ids(1, 9, seed=10))
