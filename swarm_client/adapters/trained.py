"""Directories with what was trained for a model: adapters of PEFT, and prompts."""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swarm_protocol.dht.local_registry import DEFAULT_SWARM
from swarm_protocol.process.invocation import typed

if TYPE_CHECKING:
    from swarm_client.adapters.prompts import PromptsMixin

_TRAINER_CHECKPOINT = re.compile(r"checkpoint-\d+")
PROMPTS_FILE, PEFT_CONFIG = "prompts.safetensors", "adapter_config.json"


def add_trained(model: PromptsMixin, directory: str | PathLike[str]) -> None:
    """Gives a distributed model the adapter or the prompts that ``finetune`` or PEFT has written.

    Raises:
        ValueError: there are none, or they do not fit the model.
    """
    from safetensors import safe_open

    directory = Path(directory)
    if (directory / PROMPTS_FILE).exists():
        with safe_open(directory / PROMPTS_FILE, "pt") as file:
            names = set(file.keys())
            num_tokens = file.get_slice("embedding").get_shape()[0] if "embedding" in names else 0
        model.add_prompts("deep_prompt" if "deep" in names else "prompt", num_tokens)
        model.load_prompts(directory)
    elif (directory / PEFT_CONFIG).exists():
        config = json.loads((directory / PEFT_CONFIG).read_text())
        if config.get("peft_type") == "PROMPT_TUNING":
            model.add_prompts("prompt", config["num_virtual_tokens"])
            model.load_prompts(directory)
        else:
            model.load_adapter(str(directory))
    else:
        raise ValueError(f"{directory} has neither {PEFT_CONFIG} nor {PROMPTS_FILE}: expected a trained adapter")


def restore_trained(model: PromptsMixin, directory: str | PathLike[str]) -> None:
    """Sets the model's own adapter or prompts to the values in a directory; an optimizer of theirs stays valid."""
    if model.prompts is not None:
        model.load_prompts(directory)
        return
    from peft import load_peft_weights

    saved = load_peft_weights(str(directory), device="cpu")
    with torch.no_grad():
        for name, tensor in model.get_adapter_state_dict().items():
            tensor.copy_(saved[f"base_model.model.{name.removeprefix('base_model.model.')}"])


def save_for_trainer(model: PromptsMixin, directory: str | PathLike[str]) -> None:
    """Adds what was trained to a checkpoint of Hugging Face's Trainer, under the model's own names.

    There it looks for what ``resume_from_checkpoint`` and ``load_best_model_at_end`` load; for PEFT's files it looks in
    checkpoints of a ``PeftModel`` only. Other directories are left alone.
    """
    from safetensors.torch import save_file

    if _TRAINER_CHECKPOINT.fullmatch(Path(directory).name):
        trained = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in trained.items()}
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})


def how_to_use(model_name: str, directory: str | PathLike[str], swarm: str = DEFAULT_SWARM) -> str:
    """The commands and lines of Python that load the directory."""
    flag, argument = ("", "") if swarm == DEFAULT_SWARM else (f" --swarm {swarm}", f", swarm={swarm!r}")
    return (
        f'  {typed("generate")} "…" --model {model_name}{flag} --adapter {directory}\n'
        f"  add_trained(DistributedModel.from_pretrained({model_name!r}{argument}), {str(directory)!r})"
        "  # from swarm_client.adapters.trained"
    )
