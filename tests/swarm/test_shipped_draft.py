"""The shipped model writes the same text with its own draft, in fewer passes; a draft is distilled through servers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_client import DistributedModel
from swarm_client.drafts.distilled.draft import DistilledDraft, load_distilled
from swarm_client.drafts.lookup import LookupDraft
from swarm_client.generation.generation import load_tokenizer
from swarm_client.speculation.speculation import Speculation
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from tests.drafts import Always
from tests.swarm.harness import InProcessServers
from tests.zoo import save_checkpoint

MODEL = Path(locate(DEFAULT_MODEL))
PROMPTS = ("Return a list of", "The class is used to", "Raises an exception if the")
NEW_TOKENS = 40


def test_by_default_it_is_the_models_own(shipped):
    with DistributedModel.from_pretrained(str(MODEL), shipped.initial_peers, shipped.swarm) as model:
        assert isinstance(model.speculation.draft, DistilledDraft) and not model.speculation.off
        assert 0.4 < model.speculation.draft.acceptance < 1
    with DistributedModel.from_pretrained(str(MODEL), shipped.initial_peers, shipped.swarm, draft="lookup") as model:
        assert isinstance(model.speculation.draft, LookupDraft)


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"do_sample": False}, 1), ({"do_sample": True, "temperature": 0.7}, 4)],
    ids=["greedy-one-row", "sampled-tree"],
)
def test_text_is_that_of_plain_generation_in_fewer_passes(shipped, options, rows):
    tokenizer, passes = load_tokenizer(DEFAULT_MODEL), 0
    path = str(MODEL / "draft.safetensors")
    with DistributedModel.from_pretrained(str(MODEL), shipped.initial_peers, shipped.swarm, draft=path) as model:
        draft = model.speculation.draft
        for prompt in PROMPTS:
            texts = []
            for speculation in (Speculation(None), Always(draft, rows, length=4)):
                model.speculation = speculation
                torch.manual_seed(5)
                inputs = tokenizer(prompt, return_tensors="pt")
                texts.append(model.generate(**inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **options))
            assert torch.equal(*texts)
            passes += model.speculation.stats.passes
    assert passes < 0.75 * len(PROMPTS) * NEW_TOKENS


# ------------------------------------------------------------ a draft is distilled


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_it_learns_from_what_the_local_model_would_say(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    script, texts = importlib.import_module("train_draft"), importlib.import_module("draft_texts")
    model, data, out = tmp_path / "llama", tmp_path / "data.pt", tmp_path / "draft.safetensors"
    save_checkpoint("llama", model)
    arguments = ["--tokens", "1024", "--steps", "1", "--data", str(data), "--out", str(out)]
    with InProcessServers(model, cache_tokens=4096) as servers:
        servers.start("0:2", "2:6")
        script.main([str(model), "--swarm", servers.swarm, *arguments])
    whole = AutoModelForCausalLM.from_pretrained(model).eval()
    for ids, features in torch.load(data):
        assert ids.shape == (4, texts.LENGTH)
        torch.testing.assert_close(features, texts.features_of(whole, ids), atol=0.02, rtol=0.02)
    begin = ids[:, : texts.PROMPT]
    assert torch.equal(ids, texts.continued(whole, begin, sample=False))
    assert load_distilled(out, whole).network.shape.vocab_size == whole.config.vocab_size
    script.main([str(model), "--local", *arguments])  # with the same data
    assert capsys.readouterr().out.count("the model has written") == 3
