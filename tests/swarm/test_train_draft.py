"""A draft is distilled from a model of which this process has no blocks."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from swarm_client.drafts.distilled.draft import load_distilled
from tests.swarm.harness import InProcessServers
from tests.zoo import save_checkpoint

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
