"""Packed sequences through servers: kept apart where the stock model keeps them apart, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from peft import LoraConfig
from transformers import DataCollatorWithFlattening

from swarm_client import RequestRejected
from tests.marks import always
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected, hosted, random_ids
from tests.swarm.tuning import Tuned, assert_close, lora, trained, tuned
from tests.zoo import HIDDEN

SAMPLES = ((5, 12, 3), (20,), (9, 11), (1, 1, 18), (10, 10), (2, 3, 15))  # of each row
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in SAMPLES])
IDS = random_ids(*POSITIONS.shape, seed=1)
LABELS = IDS.masked_fill(POSITIONS == 0, -100)
PACKED = {"input_ids": IDS, "position_ids": POSITIONS, "labels": LABELS}
FAMILIES = {  # of which the last keeps nothing apart
    "llama": ("q_proj", "v_proj"),
    "gpt2": ("c_attn",),
    "falcon-rw": ("query_key_value",),
}

NO_DROPOUT = {"gpt2": dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)}


@pytest.fixture(scope="module", params=always("llama", among=FAMILIES))
def family(request, tmp_path_factory) -> Iterator[tuple[InProcessServers, LoraConfig]]:
    directory, config = tmp_path_factory.mktemp(request.param), NO_DROPOUT.get(request.param)
    pieces = {"chunk_tokens": 40}  # micro-batches are computed in pieces of two rows
    with hosted(directory, "0:2", "2:6", name=request.param, config=config, **pieces) as servers:
        yield servers, lora(FAMILIES[request.param])


@pytest.fixture(scope="module")
def pair(family) -> Iterator[Tuned]:
    with tuned(*family) as pair:
        pair.train(1, lambda model: model(**PACKED, use_cache=False).loss)
        yield pair


def assert_same(pair: Tuned, **arguments) -> float:
    """Loss and gradients; returns the loss."""
    losses = []
    for model in pair.models:
        model.zero_grad()
        losses.append(model(**PACKED, **arguments).loss)
        losses[-1].backward()
    assert_close(losses[1], losses[0])
    for local, remote in zip(*map(trained, pair.models), strict=True):
        assert_close(remote.grad, local.grad)
    return float(losses[1])


@pytest.mark.promise("packed texts do not see each other")
def test_loss_and_gradients(pair):
    assert_same(pair, use_cache=False)


def test_as_the_config_says(pair):
    """Trainer sets it to False."""
    for model in pair.models:
        model.config.use_cache = False
    try:
        assert_same(pair)
        assert_same_logits(pair)
    finally:
        for model in pair.models:
            model.config.use_cache = True


def assert_same_logits(pair: Tuned, **arguments) -> None:
    with torch.no_grad():
        local, remote = (model(IDS, position_ids=POSITIONS, **arguments).logits for model in pair.models)
    assert_close(remote, local)


def test_batches_of_the_stock_collator(pair):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": IDS[0, start:end].tolist()} for start, end in ((0, 5), (5, 17), (17, 20))])
    local, remote = (model(**batch, use_cache=False).loss for model in pair.models)
    assert_close(remote, local)


def test_gradient_checkpointing(pair):
    """In training it forgoes the cache, so that packed sequences are kept apart; remote blocks have no use for it."""
    modes = [model.training for model in pair.models]
    try:
        for model in pair.models:
            model.train().gradient_checkpointing_enable()
        assert_same(pair)
    finally:
        for model, mode in zip(pair.models, modes, strict=True):
            model.train(mode).gradient_checkpointing_disable()


def test_scoring(pair):
    assert_same_logits(pair, use_cache=False)
    assert_same_logits(pair)  # a cache is made: transformers keeps nothing apart
    assert_same_logits(pair, attention_mask=torch.ones_like(IDS), use_cache=False)  # nor with a mask


def test_with_a_mask_or_a_cache_a_row_is_one_sequence(pair):
    losses = [
        assert_same(pair, use_cache=False, attention_mask=torch.ones_like(IDS)),
        assert_same(pair, use_cache=True),
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_blocks_by_hand(pair):
    if pair.remote.config.model_type == "falcon":
        pytest.skip("it keeps nothing apart")
    hidden = torch.randn(1, 20, HIDDEN)
    whole = pair.remote.blocks(hidden, position_ids=POSITIONS[:1])
    rows = [pair.remote.blocks(part) for part in hidden.split(SAMPLES[0], dim=1)]
    assert_close(whole, torch.cat(rows, dim=1))
    together = pair.remote.blocks(hidden, position_ids=POSITIONS[:1], packed=False)
    masked = pair.remote.blocks(hidden, torch.ones(1, 20, dtype=torch.long), POSITIONS[:1])
    assert torch.equal(together, masked)
    assert (together - whole).abs().max() > 0.1


def test_prompts_are_refused(family):
    with connected(family[0], tuning_mode="prompt", num_prompt_tokens=3) as remote:
        with pytest.raises(RequestRejected, match="packed sequences"):
            remote(**PACKED, use_cache=False)
        assert torch.isfinite(remote(**PACKED, use_cache=False, attention_mask=torch.ones_like(IDS)).loss)
