"""Every family of models computes and generates through real servers what it does on one machine.

All go the whole path once; what each feature of the client does is tried with families whose caches differ in kind.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from swarm_client import RequestRejected
from swarm_client.drafts.opening import why_not
from swarm_client.sessions.session import RemoteSession
from tests.drafts import Always, KnowingDraft
from tests.swarm.pair import Pair, started
from tests.swarm.tuning import assert_close
from tests.zoo import PAD, SUPPORTED

IN_PROMISE = ("llama", "gemma3_text", "jamba")  # all positions, windows, recurrent states
KINDS = (*IN_PROMISE, "mixtral", "qwen3_next", "minimax")
SPANS = ("0:2", "2:6")
ROUNDING = 1e-4  # relative; linear attention inverts a matrix, and processors sum in orders of their own: 3e-5 was seen
FORGETS_BEAMS = ("MiniMaxForCausalLM",)  # with a cache: transformers does not reorder the states of linear attention


def assert_same_tokens(pair: Pair, ids: torch.Tensor, mask: torch.Tensor, **options) -> None:
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **options}
    forgets_beams = "num_beams" in options and type(pair.whole).__name__ in FORGETS_BEAMS
    whole = pair.whole.generate(ids, use_cache=not forgets_beams, **options)
    assert torch.equal(pair.remote.generate(ids, use_cache=True, **options), whole)


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp(request.param)
    with started(directory, *SPANS, name=request.param, cache_tokens=16384) as pair:
        for model in (pair.whole, pair.remote):
            model.generation_config.pad_token_id = PAD
        yield pair


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(name, marks=pytest.mark.promise("a model of any family writes what the local model writes"))
        if name in IN_PROMISE
        else name
        for name in SUPPORTED
    ],
    indirect=True,
)
def test_the_whole_path(pair, padded):
    """Hidden states after every block, logits, beams, whose rows change places, and gradients."""
    ids, mask = padded
    assert_same_outputs(pair, ids, mask, use_cache=True)
    assert_same_tokens(pair, ids, mask, num_beams=3)
    assert_same_gradients(pair, ids, mask)
    assert bool(why_not(pair.remote)) == forgets_nothing(pair.whole)


def assert_same_outputs(pair: Pair, ids: torch.Tensor, mask: torch.Tensor, use_cache: bool) -> None:
    with torch.no_grad():
        whole, remote = (
            model(ids, attention_mask=mask, use_cache=use_cache, output_hidden_states=True)
            for model in (pair.whole, pair.remote)
        )
    for found, expected in zip(remote.hidden_states, whole.hidden_states, strict=True):
        assert_close(found[mask.bool()], expected[mask.bool()], ROUNDING)
    assert_close(remote.logits[mask.bool()], whole.logits[mask.bool()], ROUNDING)


def forgets_nothing(model: PreTrainedModel) -> bool:
    """Whether the model's cache cannot take positions back."""
    return model._is_stateful or model.config.model_type == "minimax"


def assert_same_gradients(pair: Pair, ids: torch.Tensor, mask: torch.Tensor) -> None:
    grads = []
    for model in (pair.whole, pair.remote):
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_(True)
        model(inputs_embeds=embeddings, attention_mask=mask).logits[mask.bool()].square().sum().backward()
        grads.append(embeddings.grad)
    assert grads[0].abs().max() > 0
    assert_close(grads[1], grads[0], ROUNDING)


of_kinds = pytest.mark.parametrize("pair", KINDS, indirect=True)


@of_kinds
def test_logits_and_hidden_states_without_a_cache(pair, padded):
    assert_same_outputs(pair, *padded, use_cache=False)


@of_kinds
def test_prompt_lookup(pair, padded):
    """Guesses are taken back: sliding windows must bring back what they had dropped."""
    repetitive, lookup = padded[0][1:, :6].repeat(1, 3), {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10}
    if pair.whole._is_stateful:
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            pair.remote.generate(repetitive, **lookup)
    elif pair.whole.config.model_type == "minimax":
        with pytest.raises(RuntimeError, match=r"[Aa]ssisted decoding requires a cache"):
            pair.whole.generate(repetitive, **lookup)
        with pytest.raises(RequestRejected, match="cropped"):
            pair.remote.generate(repetitive, **lookup)
    else:
        assert_same_tokens(pair, repetitive, torch.ones_like(repetitive), **lookup)


@of_kinds
def test_draft_in_rows(pair, padded, monkeypatch):
    """Guesses of several lines are taken back, or nothing is guessed where that cannot be."""
    prompt = padded[0][1:]
    obstacle = why_not(pair.remote)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "do_sample": False, "use_cache": True}
    text = pair.whole.generate(prompt, **options)[0].tolist()
    speculation = Always(KnowingDraft([text], 0.6), 3, 3)
    speculation.off = obstacle
    monkeypatch.setattr(RemoteSession, "num_sharing", 1)
    monkeypatch.setattr(pair.remote, "speculation", speculation)
    assert pair.remote.generate(prompt, **options)[0].tolist() == text
    assert bool(speculation.stats.right) == (not obstacle)
