"""From a seed or a checkpoint to stages: distributions, spans, and what cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_protocol.errors import CheckpointError, UnsupportedModel
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.settings import Scratch
from tests import zoo
from tests.unit.training.stages.engine import passes


def test_random_weights_are_drawn_as_the_family_draws_them() -> None:
    """GPT-2 scales the projections that end in the residual stream by the number of blocks."""
    config = zoo.make_config("gpt2")
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config).state_dict()
    for stage in passes.stages_of(Scratch(config, seed=1), 2):
        for name, tensor in stage.state().items():
            if tensor.dim() == 2:
                assert float(tensor.std()) == pytest.approx(float(stock[name].std()), rel=0.1), name
                assert not torch.equal(tensor, stock[name])
            else:
                assert torch.equal(tensor, stock[name]), name  # ones and zeros


def test_seeds_and_modules_have_numbers_of_their_own() -> None:
    config = zoo.make_config("llama", num_hidden_layers=2)
    one, other = (build_stage(Scratch(config, seed), 0, 1).state() for seed in (1, 2))
    matrices = [name for name in one if one[name].dim() == 2]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    first, second = (f"model.layers.{block}.self_attn.q_proj.weight" for block in (0, 1))
    assert not torch.equal(one[first], one[second])


def test_what_is_no_stage_is_refused() -> None:
    source = Scratch(zoo.make_config("llama"))
    with pytest.raises(ValueError, match="there is no stage 2: expected 0 to 1"):
        build_stage(source, 2, 2)
    with pytest.raises(ValueError, match="cannot be split into 7 stages"):
        build_stage(source, 0, 7)
    with pytest.raises(UnsupportedModel):
        build_stage(Scratch(zoo.make_config("gemma3n_text")), 0, 2)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    checkpoint = passes.open_zoo("llama", tmp_path, num_hidden_layers=2)
    checkpoint.config.intermediate_size += 1
    with pytest.raises(CheckpointError, match="has shape"):
        build_stage(checkpoint, 0, 2)
