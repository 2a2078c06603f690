"""A stage, its sums and its limits as the run file and the memory have them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from swarm_models.checkpoints.default_model import DEFAULT_MODEL
from swarm_protocol.wire.constants import MIB
from swarm_training.runfile.reading import parse_run_file
from swarm_training.runfile.settings import LocalSettings, ModelSettings
from swarm_training.stages.commands.building import build, needs_of, require_untied, stage_source, training_config
from swarm_training.stages.engine.settings import Scratch
from tests.unit.training.stages.commands.test_command_line import TEXT

FILE = parse_run_file(TEXT.replace("nowhere", DEFAULT_MODEL))


def test_what_a_stage_keeps_fits_into_the_memory_that_it_is_given() -> None:
    source, config = stage_source(FILE), replace(training_config(FILE), max_norm=0.5)
    free = build(FILE, source, 1, config)
    assert free.state.max_norm == 0.5
    needs = needs_of(FILE, free.stage)
    assert needs.num_trained == free.stage.num_trained and needs.other_bytes == 0
    gradient, least = needs.gradient_bytes, needs.needed_bytes + needs.gradient_bytes + needs.request_bytes
    assert (free.sums._max_pending_bytes, free.limits.max_bytes) == (16 * gradient, 1024 * MIB)
    with pytest.raises(ValueError, match="--memory is 100MiB: expected at least"):
        build(FILE, source, 1, config, memory_bytes=100 * MIB)
    bound = build(FILE, source, 1, config, memory_bytes=least + 2 * gradient)
    assert bound.sums._max_pending_bytes == gradient and gradient // 2 <= bound.stage._kept.max_bytes <= gradient
    assert bound.limits.max_bytes >= needs.request_bytes


def untied() -> Scratch:
    source = stage_source(FILE)
    assert isinstance(source, Scratch)
    config = copy.deepcopy(source.config)
    config.tie_word_embeddings = False
    return Scratch(config, source.seed)


def test_local_steps_with_embeddings_of_two_stages_are_refused_at_all_stages_unless_adapters_are_trained() -> None:
    file, tied = replace(FILE, model=ModelSettings("unread"), local=LocalSettings(8)), stage_source(FILE)
    with pytest.raises(ValueError, match="expected a model whose output layer has weights of its own, or a lora_rank"):
        require_untied(file, tied)
    require_untied(file, untied())
    require_untied(FILE, tied)
    for stages in (replace(file.stages, lora_rank=4), replace(file.stages, count=1)):
        require_untied(replace(file, stages=stages), tied)


def test_local_steps_have_the_optimizer_of_the_run_and_averages_an_outer_one() -> None:
    file = replace(FILE, model=ModelSettings("unread"), local=LocalSettings(8, 0.7, 0.9, nesterov=True))
    config, source = training_config(file), untied()
    made, plain = build(file, source, 0, config), build(FILE, source, 0, training_config(FILE))
    assert made.local is not None and plain.local is None
    assert isinstance(made.local.inner, torch.optim.AdamW) and made.local.batch_size == 2  # micro-batches of 4 samples
    assert made.state.optimizer_name == "SGD" and plain.state.optimizer_name == "AdamW"
    assert made.state.model_digest != plain.state.model_digest
    with torch.no_grad():
        made.stage.parameters[0].add_(1.0)
    assert bool(made.state.drift().any()) and not plain.state.drift().any()
    assert "the weights that all share" in made.memory and "the outer optimizer" in made.memory
