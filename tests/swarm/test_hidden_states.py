"""Hidden states after every block, and hooks on blocks: what the local model has, with a cache and without."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from swarm_client import RequestRejected
from tests.swarm.pair import NEW_TOKENS, random_ids
from tests.swarm.tuning import assert_close, lora, loss_of, padded_batch, tuned
from tests.zoo import BLOCKS, VOCAB

SPANS = ("0:2", "2:5", "5:6")

BATCH = padded_batch()
IDS = random_ids(1, 10, seed=3)
LONG = random_ids(1, 100, seed=4)  # comes to the servers in several steps
CACHED = pytest.mark.parametrize("use_cache", [True, False], ids=["with-cache", "without-cache"])


def assert_same_states(remote: tuple[torch.Tensor, ...], whole: tuple[torch.Tensor, ...]) -> None:
    assert len(remote) == len(whole) == BLOCKS + 1
    for found, expected in zip(remote, whole, strict=True):
        assert_close(found, expected)


# ------------------------------------------------------------ output_hidden_states


@CACHED
def test_of_a_forward_pass(pair, use_cache):
    with torch.no_grad():
        whole, remote = (
            model(LONG, output_hidden_states=True, use_cache=use_cache, logits_to_keep=1)
            for model in (pair.whole, pair.remote)
        )
    assert_same_states(remote.hidden_states, whole.hidden_states)
    assert_close(remote.logits, whole.logits)


@CACHED
def test_of_the_base_model_by_its_config_and_as_a_tuple(pair, use_cache):
    states = []
    for model in (pair.whole, pair.remote):
        model.config.output_hidden_states = True
        try:
            with torch.no_grad():
                output = model.model(IDS, use_cache=use_cache, return_dict=False)
        finally:
            model.config.output_hidden_states = False
        states.append(output[-1])
    assert_same_states(states[1], states[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "no-cache"])
def test_of_a_generation(pair, options):
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False, **options}
    whole, remote = pair.both(BATCH["input_ids"], attention_mask=BATCH["attention_mask"], **options)
    assert torch.equal(remote.sequences, whole.sequences)
    assert len(remote.hidden_states) == NEW_TOKENS
    for found, expected in zip(remote.hidden_states, whole.hidden_states, strict=True):
        hidden = slice(4, None) if found[0].shape[1] > 1 else slice(None)  # padding is nobody's business
        assert_same_states([state[:, hidden] for state in found], [state[:, hidden] for state in expected])


def test_padding_that_is_left_out_changes_no_text_and_no_gradient(pair):
    """In micro-batches with padding on the left, on both sides, on the right, and of padding alone."""
    ids = torch.randint(3, VOCAB, (4, 70), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :40] = mask[1, :9] = mask[1, 60:] = mask[2, 30:] = mask[3] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    texts = mask.bool()
    with tuned(pair.servers, lora(), skip_padding=True) as both:
        local, remote = (model(**batch, use_cache=False) for model in both.models)
        assert_close(remote.logits[texts], local.logits[texts])
        for output in (local, remote):
            output.loss.backward()
        for found, expected in zip(*both.parameters, strict=True):
            assert_close(found.grad, expected.grad)


@CACHED
def test_gradients_through_all_of_them(pair, use_cache):
    """Beside an empty cache as well."""
    with tuned(pair.servers, lora()) as both:
        both.train(1, loss_of(**BATCH))
        grads = []
        for model in both.models:
            model.zero_grad()
            embeddings = model.get_input_embeddings()(BATCH["input_ids"]).detach().requires_grad_(True)
            states = model(
                inputs_embeds=embeddings,
                attention_mask=BATCH["attention_mask"],
                output_hidden_states=True,
                use_cache=use_cache,
            ).hidden_states
            loss = sum((number + 1) * state[:, 4:].square().mean() for number, state in enumerate(states))
            loss.backward()
            grads.append(embeddings.grad)
        assert_close(grads[1], grads[0])
        for local, remote in zip(*both.parameters, strict=True):
            assert_close(remote.grad, local.grad)


def test_a_backward_pass_through_states_from_a_filled_cache_is_refused(pair):
    with torch.no_grad():
        past = pair.remote(IDS).past_key_values
    states = pair.remote(IDS, past_key_values=past, output_hidden_states=True).hidden_states
    with pytest.raises(RequestRejected, match="gradients do not flow through a cache"):
        states[3].sum().backward()


# ------------------------------------------------------------ hooks on blocks


@CACHED
def test_hooks_see_hidden_states(pair, use_cache):
    seen: list[list[torch.Tensor]] = []
    for model in (pair.whole, pair.remote):
        seen.append(found := [])
        hooks = [
            model.model.layers[3].register_forward_hook(
                lambda _block, _inputs, output, found=found: found.append(output)
            ),
            model.model.layers[-1].register_forward_pre_hook(
                lambda _block, inputs, found=found: found.append(inputs[0])
            ),
        ]
        with torch.no_grad():
            out = model(IDS, use_cache=use_cache)
            model(IDS[:, :1], past_key_values=out.past_key_values, use_cache=use_cache)
        for hook in hooks:
            hook.remove()
    assert len(seen[1]) == len(seen[0]) == 4
    for found, expected in zip(seen[1], seen[0], strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("where", ["layers.5", "norm", ""])
def test_hooks_at_the_end_see_all_positions(pair, where):
    """Also of a prompt of which only the last logits are used."""
    seen: list[torch.Tensor] = []
    for model in (pair.whole, pair.remote):

        def hook(_module, _inputs, output) -> None:
            seen.append(output if isinstance(output, torch.Tensor) else output.last_hidden_state)

        hooked = model.model.get_submodule(where).register_forward_hook(hook)
        model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=1)
        hooked.remove()
    assert_close(seen[1], seen[0])


def steered(model: PreTrainedModel, in_place: bool) -> list[torch.utils.hooks.RemovableHandle]:
    def push(_block, _inputs, output: torch.Tensor) -> torch.Tensor | None:
        return None if in_place and output.mul_(1.5) is not None else output * 1.5

    def pull(_block, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0] + 0.5, *inputs[1:])

    layers = model.model.layers
    return [layers[1].register_forward_hook(push), layers[4].register_forward_pre_hook(pull)]


def test_hooks_change_hidden_states_and_gradients(pair):
    results = []
    for model in (pair.whole, pair.remote):
        model.zero_grad()
        hooks = steered(model, in_place=False)
        loss = model(**BATCH, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), model.get_input_embeddings().weight.grad))
        for hook in hooks:
            hook.remove()
    for found, expected in zip(results[1], results[0], strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("in_place", [False, True], ids=["returned", "in-place"])
def test_changes_are_refused_where_servers_keep_a_cache(pair, in_place):
    hooks = steered(pair.remote, in_place)
    with torch.no_grad(), pytest.raises(RequestRejected, match=r"enter block 2 were changed here.*use_cache=False"):
        pair.remote(IDS)
    for hook in hooks:
        hook.remove()
    whole, remote = pair.both(IDS, do_sample=False)
    assert torch.equal(remote, whole)
    pair.servers.wait_until_all_room_is_free()


# ------------------------------------------------------------ what blocks do not have here


def test_attention_weights_are_refused(pair):
    refused = pytest.raises(RequestRejected, match=r"output_attentions=True asks for attention weights.*on the servers")
    with refused:
        pair.remote(IDS, output_attentions=True)
    with refused:
        pair.remote.generate(IDS, output_attentions=True, return_dict_in_generate=True, max_new_tokens=2)
    pair.remote.config._output_attentions = True  # as a config that was saved so has it
    try:
        with refused:
            pair.remote(IDS)
    finally:
        pair.remote.config._output_attentions = False
