"""The stages of a model compute what the stock model does: its loss, and every parameter's gradient, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm_training.stages.engine.settings import Scratch
from tests import zoo
from tests.families import UNLIKE
from tests.marks import always
from tests.unit.training.stages.engine import passes

TIED = ("gpt2", "gemma2", "bloom", "gpt_neo", "opt-projected")
FAST = ("llama", "mixtral", "nanochat", "granite", *TIED)  # the rest takes minutes


@pytest.mark.parametrize("name", always(*FAST, among=zoo.SUPPORTED))
def test_gradients_are_those_of_the_stock_model(name: str, tmp_path: Path) -> None:
    checkpoint = passes.open_zoo(name, tmp_path)
    stages = passes.stages_of(checkpoint, 3)
    ids, labels = passes.tokens()
    loss, expected = passes.gradients_of(passes.whole(str(tmp_path)), ids, labels)
    num_tokens = passes.num_targets(labels)
    loss_sum, found = passes.through(stages, ids, labels, loss_scale=num_tokens)
    assert loss_sum / num_tokens == pytest.approx(loss, abs=1e-5)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert any(bool(gradient.any()) for gradient in expected.values())
    assert bool(stages[0].shared) == bool(stages[2].shared) == checkpoint.config.tie_word_embeddings
    assert name not in TIED or stages[0].shared == stages[2].shared != stages[1].shared == ()


@pytest.mark.parametrize("name", always("llama", "gpt2", "opt-projected", among=UNLIKE))
def test_random_weights_do_not_depend_on_the_split(name: str) -> None:
    source = Scratch(zoo.make_config(name), seed=3)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    (alone,) = passes.stages_of(source, 1)
    torch.rand(7)
    state = alone.state()
    seen = set()
    for stage in passes.stages_of(source, 3):
        for name, tensor in stage.state().items():
            assert torch.equal(tensor, state[name]), name
            seen.add(name)
    assert seen == state.keys()
    torch.random.set_rng_state(before)
    again = passes.stages_of(source, 1)[0].state()
    assert torch.equal(torch.random.get_rng_state(), before)  # whoever draws beside it draws what they did
    assert all(torch.equal(again[name], state[name]) for name in state)
