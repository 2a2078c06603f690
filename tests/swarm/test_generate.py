"""A distributed model generates, computes and differentiates exactly like the whole model on one machine."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DynamicCache,
)

from swarm_client import (
    DistributedModel,
    DistributedModelForSequenceClassification,
    NoSwarm,
    RequestRejected,
)
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import NEW_TOKENS, connected, random_ids
from tests.zoo import BLOCKS, HIDDEN, POSITIONS, save_checkpoint

SPANS = ("0:2", "2:5", "5:6")


@pytest.fixture
def repetitive() -> torch.Tensor:
    """A prompt that repeats itself, for decoding that guesses ahead."""
    return random_ids(1, 6, seed=1).repeat(1, 3)


# ------------------------------------------------------------ generate

SAME = pytest.mark.promise("generate writes token for token what the local model would write")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": False}, id="greedy", marks=SAME),
        pytest.param({"do_sample": True, "top_k": 20, "temperature": 0.9}, id="sampling", marks=SAME),
        pytest.param({"do_sample": True, "num_return_sequences": 3}, id="several-samples"),
        pytest.param({"num_beams": 3}, id="beam-search", marks=SAME),
        pytest.param({"num_beams": 4, "num_return_sequences": 2}, id="several-beams"),
        pytest.param({"num_beams": 3, "do_sample": True}, id="beam-sampling"),
        pytest.param({"do_sample": False, "repetition_penalty": 1.5, "min_new_tokens": 5}, id="logits-processors"),
    ],
)
def test_tokens_of_a_left_padded_batch(pair, padded, steps, options):
    ids, mask = padded
    whole, remote = pair.both(ids, attention_mask=mask, **options)
    assert torch.equal(remote, whole)
    assert steps == [ids.shape[1]] + [1] * (NEW_TOKENS - 1)


def test_prefill_in_chunks(pair, repetitive, steps):
    whole, remote = pair.both(repetitive, do_sample=False, prefill_chunk_size=5)
    assert torch.equal(remote, whole)
    assert steps[:4] == [5, 5, 5, 3]


def test_without_cache(pair, repetitive, steps):
    whole, remote = pair.both(repetitive, do_sample=False, use_cache=False)
    assert torch.equal(remote, whole)
    assert steps == []


def test_prompt_lookup(pair, repetitive, steps):
    whole, remote = pair.both(repetitive, do_sample=False, prompt_lookup_num_tokens=3, max_new_tokens=24)
    assert torch.equal(remote, whole)
    assert max(steps[1:]) > 1


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("the-user's-cache", marks=pytest.mark.promise("a chat goes on in its session")),
        "the-returned-cache",
    ],
)
def test_chat_over_several_calls(pair, repetitive, steps, kind):
    """Every call sends only what is new: the answer's last token and the next question."""
    question_length, answer_length = 3, 5
    options = {"max_new_tokens": answer_length, "do_sample": False, "return_dict_in_generate": True}
    mine = kind == "the-user's-cache"
    talks = {model: repetitive for model in (pair.whole, pair.remote)}
    caches = {model: DynamicCache() if mine else None for model in talks}
    for turn in range(3):
        steps.clear()
        for model, talk in talks.items():
            answer = model.generate(
                talk, attention_mask=torch.ones_like(talk), past_key_values=caches[model], **options
            )
            caches[model] = caches[model] if mine else answer.past_key_values
            talks[model] = torch.cat([answer.sequences, random_ids(1, question_length, seed=turn)], dim=1)
        assert torch.equal(talks[pair.remote], talks[pair.whole])
        assert steps == [repetitive.shape[1] if turn == 0 else 1 + question_length] + [1] * (answer_length - 1)
    assert caches[pair.remote].get_seq_length() == caches[pair.whole].get_seq_length()


def test_room_comes_back_when_a_generation_ends(pair, padded):
    """At once: not when the garbage collector happens to run."""
    ids, mask = padded
    gc.collect()
    gc.disable()
    try:
        for options in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": False, "prompt_lookup_num_tokens": 3}):
            ids, mask = (ids[1:], mask[1:]) if "prompt_lookup_num_tokens" in options else (ids, mask)
            pair.remote.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **options)
        pair.servers.wait_until_all_room_is_free()
    finally:
        gc.enable()


# ------------------------------------------------------------ forward


def test_spans_outside_the_model_are_refused(pair):
    with pytest.raises(ValueError, match="blocks 4:7 are outside 0:6"):
        pair.remote.blocks[4:7]
    with pytest.raises(ValueError, match="blocks 3:3 are no range of blocks"):
        pair.remote.blocks[3:3]


def test_gradients_around_a_local_module_between_blocks(pair, repetitive):
    whole_blocks, remote_blocks = pair.whole.model.layers, pair.remote.blocks
    positions = torch.arange(repetitive.shape[1])[None]
    grads = []
    for remote in (False, True):
        torch.manual_seed(0)
        between = torch.nn.Linear(HIDDEN, HIDDEN)
        hidden = pair.whole.get_input_embeddings()(repetitive).detach().requires_grad_(True)
        if remote:
            output = remote_blocks[4:6](between(remote_blocks[1:4](hidden)))
        else:
            rotary = pair.whole.model.rotary_emb(hidden, positions)
            output = hidden
            for index in range(1, BLOCKS):
                output = between(output) if index == 4 else output
                output = whole_blocks[index](output, attention_mask=None, position_embeddings=rotary)
        output.square().sum().backward()
        grads.append((hidden.grad, between.weight.grad))
    for whole, through_swarm in zip(*grads, strict=True):
        assert whole.abs().max() > 0
        torch.testing.assert_close(through_swarm, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_sequence_classification(tmp_path, padded):
    ids, mask = padded
    save_checkpoint("llama", tmp_path, task="sequence-classification", num_labels=3)
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with InProcessServers(tmp_path, memory_dht=True) as servers:
        servers.start("0:4", "4:6")
        with connected(servers, DistributedModelForSequenceClassification) as remote, torch.no_grad():
            assert torch.equal(remote(ids, attention_mask=mask).logits, whole(ids, attention_mask=mask).logits)
            labels = torch.tensor([2, 0])
            loss = remote(ids, attention_mask=mask, labels=labels).loss
            assert torch.equal(loss, whole(ids, attention_mask=mask, labels=labels).loss)


# ------------------------------------------------------------ the client's part


def test_a_closed_model_says_so(pair, repetitive):
    with DistributedModel.from_pretrained(
        pair.servers.model, initial_peers=pair.servers.initial_peers, swarm=pair.servers.swarm
    ) as model:
        model.generate(repetitive, max_new_tokens=2)
    with pytest.raises(NoSwarm, match="closed"):
        model.generate(repetitive, max_new_tokens=2)
    pair.servers.wait_until_all_room_is_free()


def test_too_long_a_prompt_is_refused(pair):
    with pytest.raises(RequestRejected, match=f"{POSITIONS + 1} positions, but the model has {POSITIONS}"):
        pair.remote.generate(random_ids(1, POSITIONS, seed=0), max_new_tokens=2)
    with pytest.raises(RequestRejected, match=f"more than the model's {POSITIONS}"), torch.no_grad():
        pair.remote(random_ids(1, POSITIONS + 1, seed=0))
    with pytest.raises(RequestRejected, match=f"more than the model's {POSITIONS}"):
        pair.remote.blocks[0:6](torch.zeros(1, POSITIONS + 1, HIDDEN))


def test_a_cache_of_a_local_model_is_refused(pair, repetitive):
    cache = DynamicCache()
    pair.whole.generate(repetitive, max_new_tokens=2, past_key_values=cache)
    with pytest.raises(RequestRejected, match="keys and values on this machine"):
        pair.remote.generate(repetitive, max_new_tokens=2, past_key_values=cache)
