"""What all stages have, as a checkpoint that stock transformers and this package load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_training.stages.engine.export import export, export_adapter
from swarm_training.stages.engine.settings import Scratch
from tests import zoo
from tests.marks import always
from tests.unit.training.stages.engine import passes

FAST = ("llama", "gpt2", "mixtral", "gpt_neo")


@pytest.mark.parametrize("name", always(*FAST, among=zoo.SUPPORTED))
def test_a_checkpoint_is_the_model_that_was_trained(name: str, tmp_path: Path) -> None:
    config = zoo.make_config(name)
    stages = passes.stages_of(Scratch(config, seed=2), 3)
    export((stage.state() for stage in stages), config, tmp_path)
    ids, labels = passes.tokens()
    hidden = ids
    for stage in stages[:-1]:
        found = stage.forward(hidden).hidden
        assert found is not None
        hidden = found
    with torch.no_grad():
        expected = stages[-1]._run(hidden)
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        torch.testing.assert_close(model.eval()(ids, use_cache=False).logits, expected, rtol=0, atol=0)
    assert type(model).__name__ in model.config.architectures and model.config.dtype == torch.float32
    zoo.save_checkpoint(name, tmp_path / "stock")  # under the names that checkpoints of this family have
    checkpoint = ModelCheckpoint.open(tmp_path)
    assert set(checkpoint.tensor_names) == set(ModelCheckpoint.open(tmp_path / "stock").tensor_names)
    _, gradients = passes.through(passes.stages_of(checkpoint, 2), ids, labels)
    _, before = passes.through(stages, ids, labels)
    assert all(torch.equal(gradients[each], before[each]) for each in before)
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"config.json", "generation_config.json", "model.safetensors.index.json"} | {
        f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)
    }


def test_states_that_are_no_whole_model_are_refused(tmp_path: Path) -> None:
    config = zoo.make_config("gpt2", num_hidden_layers=2)
    first, last = (stage.state() for stage in passes.stages_of(Scratch(config), 2))
    with pytest.raises(ValueError, match=r"no stage has tensor transformer\.h\.1"):
        export([first], config, tmp_path)
    with pytest.raises(ValueError, match="stage 1 has a tensor other"):
        export([first, {"other": torch.zeros(1)}], config, tmp_path)
    shared = "transformer.wte.weight"
    with pytest.raises(ValueError, match=f"tensor {shared} differs between stages"):
        export([first, last | {shared: last[shared] + 1}], config, tmp_path)
    assert not (tmp_path / "model.safetensors.index.json").exists()
    with pytest.raises(ValueError, match="no adapter"):
        export_adapter([], 8, tmp_path, "model")
