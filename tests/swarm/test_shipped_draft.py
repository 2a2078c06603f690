"""The shipped model writes the same text with its own draft, in fewer passes through the servers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm_client import DistributedModel
from swarm_client.drafts.distilled.draft import DistilledDraft
from swarm_client.drafts.lookup import LookupDraft
from swarm_client.generation.generation import load_tokenizer
from swarm_client.speculation.speculation import Speculation
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from tests.drafts import Always

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
