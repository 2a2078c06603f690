"""What a client's half of a model saves: an adapter or prompts, never a checkpoint that lacks the blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from swarm_client import RequestRejected
from swarm_client.model.model import load_client
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from tests.vision_zoo import save_seeing
from tests.zoo import save_checkpoint

REFUSED = "blocks are on servers: saved without them, it would load with random ones.*add_adapter.*tuning_mode"


@pytest.fixture
def client(tmp_path) -> PreTrainedModel:
    save_checkpoint("llama", tmp_path / "model")
    return client_of(tmp_path / "model")


def client_of(directory: Path) -> PreTrainedModel:
    return load_client(ModelCheckpoint.open(directory), AutoModelForCausalLM, torch.float32, torch.device("cpu"))


def save_with_trainer(model: PreTrainedModel, directory: Path) -> None:
    Trainer(model, TrainingArguments(str(directory), report_to=[], use_cpu=True)).save_model()


WAYS: dict[str, Callable[[PreTrainedModel, Path], object]] = {
    "save_pretrained": lambda model, path: model.save_pretrained(path),
    "state-dict": lambda model, path: model.save_pretrained(path, state_dict=model.state_dict()),
    "push_to_hub": lambda model, path: model.push_to_hub("me/mine"),
    "push-while-saving": lambda model, path: model.save_pretrained(path, push_to_hub=True),
    "base-model": lambda model, path: model.model.save_pretrained(path),
    "base-model-to-hub": lambda model, path: model.base_model.push_to_hub("me/mine"),
    "trainer": save_with_trainer,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_without_blocks_is_refused(client, tmp_path, way):
    saved = tmp_path / "saved"
    with pytest.raises(RequestRejected, match=REFUSED):
        WAYS[way](client, saved)
    assert not list(saved.glob("*"))


def test_an_adapter_is_saved_alone_until_it_is_deleted(client, tmp_path):
    client.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    save_with_trainer(client, tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names and "model.safetensors" not in names
    client.delete_adapter("default")
    with pytest.raises(RequestRejected, match=REFUSED):
        client.save_pretrained(tmp_path / "again")


def test_prompts_are_saved(client, tmp_path):
    client.add_prompts("prompt", 3)
    client.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "prompts.safetensors").exists()


def test_prompts_of_a_model_that_sees_are_saved_in_the_format_of_peft(tmp_path):
    save_seeing("llava", tmp_path / "model")
    client = client_of(tmp_path / "model")
    client.add_prompts("prompt", 3)
    client.save_pretrained(tmp_path / "saved")
    written = peft.PeftConfig.from_pretrained(tmp_path / "saved")
    assert written.num_layers == client.config.text_config.num_hidden_layers


@pytest.mark.parametrize("missing", ["", "prompts.safetensors"])  # without it, PEFT's own file is read
def test_a_model_without_prompts_takes_none_from_a_directory(client, tmp_path, missing):
    saving = client_of(tmp_path / "model")
    saving.add_prompts("prompt", 3)
    saving.save_pretrained(tmp_path / "saved")
    if missing:
        (tmp_path / "saved" / missing).unlink()
    with pytest.raises(ValueError, match="this model has no prompts"):
        client.load_prompts(tmp_path / "saved")
