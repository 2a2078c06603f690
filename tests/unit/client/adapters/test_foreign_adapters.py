"""Adapters of strangers on the client: what PEFT would make of them, without running what it could hang on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm_client.adapters.trained import add_trained
from swarm_client.model.model import load_client
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import CheckpointError
from tests.zoo import HIDDEN, save_checkpoint

EVIL = r"^(([a-z_.0-9]+)+)+(([a-z_.0-9]+)+)+!$"  # re takes longer than there is
TARGETS = {
    "names": dict(target_modules=["q_proj", "down_proj"]),
    "an expression": dict(target_modules=r".*\.(self_attn|mlp)\.(q|down)_proj"),
    "assertions": dict(target_modules=r"^(?!.*layers\.2).*(?<=self_attn\.)q_proj$"),
    "all": dict(target_modules="all-linear"),
    "some blocks": dict(target_modules=["q_proj"], layers_to_transform=[1, 3], layers_pattern="layers"),
    "without some": dict(target_modules=["q_proj", "v_proj"], exclude_modules=r".*\.layers\.[0-3]\..*"),
    "ranks": dict(
        target_modules=r".*\.[qv]_proj",
        rank_pattern={"q_proj": 2, r".*layers\.(1|2)\..*v_proj": 3},
        alpha_pattern={r"^model\.layers\.\d\.self_attn\.v_proj": 5},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint("llama", directory)
    return directory


@pytest.fixture
def client(model: Path) -> PreTrainedModel:
    return load_client(ModelCheckpoint.open(model), AutoModelForCausalLM, torch.float32, torch.device("cpu"))


def save_adapter(model: Path, directory: Path, config: Any = None, **options: Any) -> Path:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(base, config or LoraConfig(r=4, lora_alpha=6, **options)).save_pretrained(directory)
    return directory


def change(directory: Path, **options: Any) -> Path:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    return directory


def layers(model: torch.nn.Module) -> dict[str, tuple[int, float]]:
    """Rank and scaling of each of PEFT's layers, by name."""
    found = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and module.lora_A}
    return {name: (layer.r["default"], layer.scaling["default"]) for name, layer in found.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_layers_are_where_peft_puts_them(client, model, tmp_path, name):
    save_adapter(model, tmp_path, **TARGETS[name])
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = layers(PeftModel.from_pretrained(base, tmp_path).base_model.model)
    client.load_adapter(tmp_path)
    assert layers(client) == expected != {}
    client.save_pretrained(tmp_path / "again")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert layers(PeftModel.from_pretrained(base, tmp_path / "again").base_model.model) == expected


@pytest.mark.parametrize("option", ["target_modules", "exclude_modules"])
def test_expressions_for_target_modules_are_not_run(client, model, tmp_path, option):
    save_adapter(model, tmp_path, target_modules=["q_proj"])
    change(tmp_path, **{option: EVIL})
    client.load_adapter(tmp_path)
    assert len(layers(client)) == 6 and all(name.endswith("q_proj") for name in layers(client))


@pytest.mark.parametrize("option", ["alpha_pattern", "rank_pattern"])
def test_expressions_for_numbers_are_not_run_by_re(client, model, tmp_path, option):
    save_adapter(model, tmp_path, target_modules=["q_proj"])
    change(tmp_path, **{option: {EVIL: 3, ".*layers.2.*": 4}})
    client.load_adapter(tmp_path)
    assert getattr(client.peft_config["default"], option) == {r"^(?:model\.layers\.2\.self_attn\.q_proj)": 4}


REFUSED = {
    "expression": (dict(modules_to_save=[EVIL]), r"has modules_to_save '\^\(\(.*: expected names of modules"),
    "expression for blocks": (dict(layers_pattern=EVIL), "has layers_pattern .*: expected names of modules"),
    "targets": (dict(target_modules=7), "has target_modules 7: expected names of modules"),
    "targets in lists": (
        dict(target_modules=[["q_proj"]]),
        r"has target_modules \['q_proj'\]: expected names of modules",
    ),
    "pattern": (dict(alpha_pattern={r"(?=q)q_proj": 2}), "has a pattern .* that cannot be used: .*RE2's syntax"),
    "type": (dict(peft_type="LO"), "is of PEFT's type 'LO': expected LORA"),
    "alpha": (dict(lora_alpha=float("nan")), r"adapter_config\.json has lora_alpha=nan: expected a finite number"),
    "rank": (dict(r=-1), r"adapter_config\.json has r=-1: expected a whole number"),
    "option": (dict(eva_config=3), r"adapter_config\.json is no config of PEFT"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(client, model, tmp_path, name):
    options, sentence = REFUSED[name]
    save_adapter(model, tmp_path, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=sentence) as caught:
        client.load_adapter(change(tmp_path, **options))
    assert "\n" not in str(caught.value)
    assert layers(client) == {}


def test_damaged_files_are_refused(client, model, tmp_path):
    save_adapter(model, tmp_path, target_modules=["q_proj"])
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    for content, sentence in ((b"\xff" * 64, "is no safetensors file"), (weights.read_bytes()[:-1], "is truncated")):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=sentence):
            add_trained(client, tmp_path)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        add_trained(client, tmp_path)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is no valid JSON: it is nested too deeply"):
        add_trained(client, tmp_path)


def test_files_that_do_not_fit_their_config_are_refused(client, model, tmp_path):
    save_adapter(model, tmp_path, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"does not fit its config or this model: tensor .*v_proj"):
        client.load_adapter(change(tmp_path, target_modules=["q_proj"]))
    assert layers(client) == {}


def test_a_model_that_uses_an_adapter_of_the_servers_has_no_other(client, model, tmp_path):
    save_adapter(model, tmp_path, target_modules=["q_proj"])
    client._remote_blocks[0].adapter_name = "polite"
    refused = "the model uses adapter 'polite' of the servers: it cannot have another"
    with pytest.raises(ValueError, match=refused):
        client.add_adapter(LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=refused):
        client.load_adapter(tmp_path)
    assert layers(client) == {}


def test_an_adapter_that_is_nowhere(client, tmp_path):
    with pytest.raises(ValueError, match="adapter someone/adapter is neither a directory nor one on the hub"):
        client.load_adapter("someone/adapter")
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        client.load_adapter(tmp_path)


def test_an_adapter_on_the_hub(client, model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--adapter"
    save_adapter(model, repository / "snapshots" / ("0" * 40), target_modules=["q_proj"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    client.load_adapter("someone/adapter", revision="main")
    assert len(layers(client)) == 6


def test_prompts_that_peft_saved_are_as_many_as_there_are(client, model, tmp_path):
    save_adapter(model, tmp_path, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    add_trained(client, change(tmp_path, num_virtual_tokens=10**12))
    assert client.prompts.num_tokens == 3


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"deep": torch.zeros(6, 3, HIDDEN)}, "has no matrix 'embedding' of virtual tokens"),
        ({"embedding": torch.zeros(3)}, "has no matrix 'embedding' of virtual tokens"),
        ({"embedding": torch.zeros(10**12, 0)}, "has no matrix 'embedding' of virtual tokens"),
        ({"embedding": torch.zeros(3, 5)}, r"has prompts of shapes .*expected \{'embedding': \[3, 64\]\}"),
    ],
)
def test_prompts_that_are_refused(client, tmp_path, tensors, sentence):
    save_file(tensors, tmp_path / "prompts.safetensors")
    with pytest.raises(ValueError, match=sentence):
        add_trained(client, tmp_path)


def test_prompts_that_are_damaged(client, tmp_path):
    (tmp_path / "prompts.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"prompts\.safetensors is no safetensors file"):
        add_trained(client, tmp_path)
