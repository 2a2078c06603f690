"""Directories with the trained parameters of a model: adapters of PEFT, and prompts."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swarm_client.adapters.prompts import PEFT_KEY, PROMPTS_FILE
from swarm_models.checkpoints.files import LocalFiles
from swarm_models.checkpoints.peft_files import CONFIG_NAME, WEIGHTS_NAME
from swarm_models.checkpoints.safetensors_file import read_header
from swarm_protocol.errors import CheckpointError
from swarm_protocol.process.invocation import typed
from swarm_protocol.process.local_registry import DEFAULT_SWARM
from swarm_protocol.untrusted.json_file import read_object

if TYPE_CHECKING:
    from swarm_client.adapters.prompts import PromptsMixin

_TRAINER_CHECKPOINT = re.compile(r"checkpoint-\d+")


def add_trained(model: PromptsMixin, directory: str | PathLike[str]) -> None:
    """Add the adapter or the prompts that ``finetune`` or PEFT has written to a distributed model.

    Raises:
        ValueError: the directory has neither, or they do not fit the model.
        CheckpointError: the files cannot be read.
    """
    files = LocalFiles(Path(directory))
    if (Path(directory) / PROMPTS_FILE).exists():
        path = files.path(PROMPTS_FILE)
        mode = "deep_prompt" if "deep" in read_header(path) else "prompt"
        model.add_prompts(mode, _num_tokens(path, "embedding"))
        model.load_prompts(directory)
    elif (Path(directory) / CONFIG_NAME).exists():
        if read_object(files.path(CONFIG_NAME)).get("peft_type") == "PROMPT_TUNING":
            model.add_prompts("prompt", _num_tokens(files.path(WEIGHTS_NAME), PEFT_KEY))
            model.load_prompts(directory)
        else:
            model.load_adapter(str(directory))
    else:
        raise ValueError(f"{directory} has neither {CONFIG_NAME} nor {PROMPTS_FILE}: expected a trained adapter")


def _num_tokens(path: Path, name: str) -> int:
    """Return how many virtual tokens the file has under this name."""
    stored = read_header(path).get(name)
    if stored is None or len(stored.shape) != 2 or not stored.size_bytes:
        raise CheckpointError(f"{path} has no matrix {name!r} of virtual tokens")
    return stored.shape[0]


def restore_trained(model: PromptsMixin, directory: str | PathLike[str]) -> None:
    """Set the model's adapter or prompts to the values in a directory, in place, so that optimizers stay valid."""
    if model.prompts is not None:
        model.load_prompts(directory)
        return
    from peft import load_peft_weights

    saved = load_peft_weights(str(directory), device="cpu")
    with torch.no_grad():
        for name, tensor in model.get_adapter_state_dict().items():
            tensor.copy_(saved[f"base_model.model.{name.removeprefix('base_model.model.')}"])


def save_for_trainer(model: PromptsMixin, directory: str | PathLike[str]) -> None:
    """Add the trained parameters to a checkpoint of Hugging Face's Trainer, under the model's own names.

    The Trainer's ``resume_from_checkpoint`` and ``load_best_model_at_end`` read this file. They read PEFT's files only
    for a ``PeftModel``. Other directories are left unchanged.
    """
    from safetensors.torch import save_file

    if _TRAINER_CHECKPOINT.fullmatch(Path(directory).name):
        trained = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in trained.items()}
        save_file(tensors, Path(directory) / "model.safetensors", {"format": "pt"})


def how_to_use(model_name: str, directory: str | PathLike[str], swarm: str = DEFAULT_SWARM) -> str:
    """Return the commands and lines of Python that load the directory."""
    flag, argument = ("", "") if swarm == DEFAULT_SWARM else (f" --swarm {swarm}", f", swarm={swarm!r}")
    return (
        f'  {typed("generate")} "…" --model {model_name}{flag} --adapter {directory}\n'
        f"  add_trained(DistributedModel.from_pretrained({model_name!r}{argument}), {str(directory)!r})"
        "  # from swarm_client.adapters.trained"
    )
