"""Adapters that ``peft`` has saved: read as what PEFT reads, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm_protocol.checkpoints.checkpoint import Checkpoint
from swarm_protocol.checkpoints.describing import describe
from swarm_protocol.checkpoints.peft_files import read_adapter
from swarm_protocol.errors import CheckpointError
from swarm_protocol.span import Span
from swarm_server.node.preloaded import check_adapters
from tests.adapted import LocalModel
from tests.unit.client.adapters.test_lora import TARGETS
from tests.zoo import BLOCKS, make_config, save_checkpoint

WHOLE = Span(0, BLOCKS)


@pytest.mark.parametrize("family", TARGETS)
def test_it_is_what_peft_saved(family, tmp_path):
    save_checkpoint(family, tmp_path / "model")
    targets = TARGETS[family]
    options = {
        "llama": dict(use_rslora=True),
        "gpt2": dict(rank_pattern={"c_proj": 2}, alpha_pattern={r"h\.[1-3]\.attn\.c_proj": 5}, fan_in_fan_out=True),
        "opt": dict(use_rslora=True, rank_pattern={"fc1": 2}, alpha_pattern={"layers.2.fc1": 3, "fc1": 7}),
        "mixtral": dict(layers_to_transform=[1, 2]),
    }
    local = LocalModel.load(
        tmp_path / "model", r=4, lora_alpha=6, lora_dropout=0.1, target_modules=targets, **options.get(family, {})
    )
    local.peft.save_pretrained(tmp_path / "saved")
    config = Checkpoint.open(tmp_path / "model").config
    adapter = read_adapter(tmp_path / "saved", local.family)
    expected = LocalModel.saved(tmp_path / "model", tmp_path / "saved").adapter(WHOLE, dropout=0.1)
    assert len(adapter.low_rank) == len(expected.low_rank) > 0
    by_place = {(part.block, part.module): part for part in adapter.low_rank}
    for part in expected.low_rank:
        read = by_place[part.block, part.module]
        assert (read.scaling, read.dropout) == (part.scaling, part.dropout)
        assert torch.equal(read.a, part.a) and torch.equal(read.b, part.b)
    check_adapters([tmp_path / "saved"], local.family, config)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save_checkpoint("llama", directory / "model")
    local = LocalModel.load(directory / "model", r=2, target_modules=["q_proj"])
    local.peft.save_pretrained(directory / "adapter")
    return directory / "adapter"


FAMILY = describe(make_config("llama"))


def changed(saved: Path, tmp_path: Path, *, tensors: dict[str, torch.Tensor] | None = None, **config) -> Path:
    """A copy of the adapter with another config, or with other or further tensors."""
    written = json.loads((saved / "adapter_config.json").read_text()) | config
    (tmp_path / "adapter_config.json").write_text(json.dumps(written))
    save_file(load_file(saved / "adapter_model.safetensors") | (tensors or {}), tmp_path / "adapter_model.safetensors")
    return tmp_path


CONFIGS = {
    "another type": (dict(peft_type="IA3"), "PEFT's type 'IA3': expected LORA"),
    "dora": (dict(use_dora=True), "uses use_dora, which scales weights by their magnitude"),
    "bias": (dict(bias="lora_only"), r"trains biases \(bias='lora_only'\): expected 'none'"),
    "bias of lora": (dict(lora_bias=True), "uses lora_bias, which trains biases"),
    "modules": (dict(modules_to_save=["lm_head"]), "uses modules_to_save, which trains whole modules"),
    "tokens": (dict(trainable_token_indices=[1]), "uses trainable_token_indices"),
    "parameters": (dict(target_parameters=["experts.down_proj"]), "uses target_parameters, which adapts parameters"),
    "pissa": (dict(init_lora_weights="pissa"), "init_lora_weights='pissa', which changes the model's own weights"),
    "alpha": (dict(lora_alpha="much"), "lora_alpha or lora_dropout is no number"),
    "dropout": (dict(lora_dropout=1.5), "lora_dropout=1.5: expected"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_refused(saved, tmp_path, name):
    config, sentence = CONFIGS[name]
    with pytest.raises(CheckpointError, match=sentence):
        read_adapter(changed(saved, tmp_path, **config), FAMILY)


Q = "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"
TENSORS = {
    "head": ({"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 64)}, "'lm_head', which is not inside"),
    "magnitudes": (
        {Q.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)},
        "expected lora_A and lora_B",
    ),
    "bias": ({Q.replace("lora_A.weight", "lora_B.bias"): torch.zeros(64)}, "expected lora_A and lora_B"),
    "rank": ({Q: torch.zeros(3, 64)}, "no lora_A and lora_B of one rank for 'model.layers.3.self_attn.q_proj'"),
    "alone": ({Q.replace("q_proj", "v_proj"): torch.zeros(2, 64)}, "no lora_A and lora_B of one rank"),
    "vector": ({Q: torch.zeros(64)}, "no matrix"),
    "nan": ({Q: torch.full((2, 64), float("nan"))}, "is not finite"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_refused(saved, tmp_path, name):
    tensors, sentence = TENSORS[name]
    with pytest.raises(CheckpointError, match=sentence):
        read_adapter(changed(saved, tmp_path, tensors=tensors), FAMILY)


def test_what_does_not_fit_the_model(saved, tmp_path):
    wide = {Q: torch.zeros(2, 65)}
    deep = {Q.replace("3", "9"): torch.zeros(2, 64), Q.replace("3", "9").replace("_A", "_B"): torch.zeros(64, 2)}
    for number, (tensors, sentence) in enumerate(((wide, r"expected \[rank, 64\]"), (deep, "for block 9"))):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(ValueError, match=f"adapter .* does not fit the model: .*{sentence}"):
            check_adapters([changed(saved, directory, tensors=tensors)], FAMILY, make_config("llama"))


def test_what_is_no_adapter(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"no readable adapter_config.json \(FileNotFoundError\)"):
        read_adapter(tmp_path, FAMILY)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no readable adapter_config.json \(JSONDecodeError\)"):
        read_adapter(tmp_path, FAMILY)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="PEFT's type None"):
        read_adapter(tmp_path, FAMILY)
    (tmp_path / "adapter_config.json").write_text((saved / "adapter_config.json").read_text())
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is missing"):
        read_adapter(tmp_path, FAMILY)


def test_adapters_that_peft_really_writes_and_we_refuse(tmp_path):
    save_checkpoint("llama", tmp_path / "model")
    for number, config in enumerate(
        (
            LoraConfig(target_modules=["q_proj"], use_dora=True),
            LoraConfig(target_modules=["q_proj"], bias="all"),
            LoraConfig(target_modules=["q_proj", "lm_head"]),
            LoraConfig(target_modules=["q_proj"], init_lora_weights="olora"),
            PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        )
    ):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        get_peft_model(model, config).save_pretrained(tmp_path / str(number))
        with pytest.raises(CheckpointError) as caught:
            read_adapter(tmp_path / str(number), FAMILY)
        assert "\n" not in str(caught.value)
