"""LoRA on every stage, beside plain PEFT on the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from swarm_models.checkpoints.peft_files import read_adapter
from swarm_training.stages.engine import lora
from swarm_training.stages.engine.building import build_stage
from swarm_training.stages.engine.export import export_adapter
from swarm_training.stages.engine.lora import name_in_peft_file
from swarm_training.stages.engine.settings import LoraSettings, Scratch, StageOptions
from swarm_training.stages.engine.stage import Stage
from tests import zoo
from tests.unit.training.stages.engine import passes


def with_adapter(stages: list[Stage]) -> list[Stage]:
    """B is 0 at first, and A's gradient with it."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return stages


@pytest.mark.parametrize("name", ["llama", "bloom", "gpt2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_and_files_are_those_of_peft(name: str, precision: str, tmp_path: Path) -> None:
    checkpoint = passes.open_zoo(name, tmp_path / "model")
    settings = LoraSettings(rank=4)
    options = StageOptions(precision=precision, lora=settings)
    stages = with_adapter(passes.stages_of(checkpoint, 3, options))
    assert all(".lora_" in each for stage in stages for each in stage.names)
    assert not any(stage.shared for stage in stages)
    export_adapter((stage.state() for stage in stages), settings.rank, tmp_path / "adapter", checkpoint.location)

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = PeftModel.from_pretrained(
        passes.whole(checkpoint.location, dtype), tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False
    )
    ids, labels = passes.tokens()
    _, expected = passes.gradients_of(model, ids, labels)
    _, found = passes.through(stages, ids, labels, passes.num_targets(labels))
    found = {f"base_model.model.{each}": gradient for each, gradient in found.items()}
    assert found.keys() == expected.keys()
    assert [each for each in expected if not torch.equal(found[each], expected[each])] == []
    assert len(read_adapter(tmp_path / "adapter", checkpoint.family).low_rank) == len(expected) // 2


def test_an_adapter_has_the_numbers_that_each_part_had_when_it_came(tmp_path: Path) -> None:
    """A part with the moving average of the weights has the weights again when the next part is asked for."""
    stages = with_adapter(passes.stages_of(Scratch(zoo.make_config("llama")), 2, StageOptions(lora=LoraSettings())))
    expected = {name_in_peft_file(name): each.clone() for stage in stages for name, each in stage.state().items()}

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        for stage in stages:
            yield stage.state()
            for each in stage.state().values():
                each.zero_()

    export_adapter(parts(), 8, tmp_path, "model")
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_adapters_begin_alike_whatever_the_split_and_as_in_peft() -> None:
    config = zoo.make_config("llama")
    options = StageOptions(lora=LoraSettings(rank=8, seed=2))
    alone = build_stage(Scratch(config), 0, 1, options).state()
    split = {k: v for stage in passes.stages_of(Scratch(config), 3, options) for k, v in stage.state().items()}
    assert split.keys() == alone.keys() and all(torch.equal(split[name], alone[name]) for name in alone)
    whole = get_peft_model(  # type: ignore[no-untyped-call]
        passes.AutoModelForCausalLM.from_config(config),
        LoraConfig(r=8, task_type="CAUSAL_LM"),
    )
    theirs = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    assert theirs == {f"base_model.model.{name}" for name in alone}
    for name, tensor in alone.items():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
            assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.2)
        else:
            assert not tensor.any()


def test_modules_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "peft_config", lambda rank: LoraConfig(r=rank, target_modules=["nothing"]))
    with pytest.raises(ValueError, match="blocks 0:3 cannot have LoRA with PEFT's default target_modules"):
        build_stage(Scratch(zoo.make_config("llama")), 0, 2, StageOptions(lora=LoraSettings()))
