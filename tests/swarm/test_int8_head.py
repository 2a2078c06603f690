"""With its head in int8, a distributed model generates exactly like the whole model with the same head."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client.model.head import Int8Head, quantize_head_
from tests.marks import SLOW
from tests.swarm.harness import InProcessServers
from tests.swarm.pair import connected
from tests.zoo import VOCAB, save_checkpoint

NEW_TOKENS = 12


@pytest.fixture(scope="module", params=[pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=SLOW)])
def models(tmp_path_factory, request) -> Iterator[tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]]:
    """The whole model with its head in int8, the same through servers, and the whole model as it was."""
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory, tie_word_embeddings=request.param)
    exact, whole = (AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval() for _ in range(2))
    quantize_head_(whole)
    with InProcessServers(directory, memory_dht=True) as servers:
        servers.start("0:6")
        with connected(servers, head_quant="int8") as remote:
            assert isinstance(remote.lm_head, Int8Head) and remote.lm_head.tied == request.param
            for model in (exact, whole, remote):
                model.generation_config.eos_token_id = None
            yield whole, remote, exact


@pytest.mark.promise("an int8 head writes nearly what the exact one writes")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": False}, id="greedy"),
        pytest.param({"do_sample": True, "top_k": 20}, id="sampling"),
        pytest.param({"num_beams": 3}, id="beam-search"),
        pytest.param({"do_sample": False, "prompt_lookup_num_tokens": 3}, id="prompt-lookup"),
        pytest.param({"assisted": True}, id="assisted"),
    ],
)
def test_tokens(models, options):
    whole, remote, exact = models
    ids = torch.randint(3, VOCAB, (1, 6), generator=torch.Generator().manual_seed(1)).repeat(1, 3)
    if options.get("assisted"):
        options = {"do_sample": False, "assistant_model": exact}
    tokens = []
    for model in (whole, remote):
        torch.manual_seed(3)
        tokens.append(model.generate(ids, max_new_tokens=NEW_TOKENS, **options))
    assert tokens[1].shape[1] == ids.shape[1] + NEW_TOKENS
    assert torch.equal(tokens[1], tokens[0])


def test_only_the_head_is_rounded(models):
    _, remote, exact = models
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = [model.model(ids).last_hidden_state for model in (remote, exact)]
        logits = [model(ids).logits for model in (remote, exact)]
    assert torch.equal(hidden[0], hidden[1])
    assert 0 < (logits[0] - logits[1]).norm() / logits[1].norm() < 0.02
