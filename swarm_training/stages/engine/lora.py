"""Low-rank adapters in a stage's blocks. They begin with the same numbers however the model is split."""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn
from transformers import PreTrainedModel

from swarm_protocol.span import Span
from swarm_training.stages.engine.settings import LoraSettings, seed_of

ADAPTER = "default"
_ALPHA = 16
_MATRIX_A, _MATRIX_B = f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def peft_config(rank: int, base_model: str | None = None):  # type: ignore[no-untyped-def]  # PEFT is imported late
    """Return the ``peft.LoraConfig`` of an adapter for the model ``base_model``."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=_ALPHA, task_type="CAUSAL_LM", base_model_name_or_path=base_model)


def add_lora(model: PreTrainedModel, settings: LoraSettings, span: Span) -> None:
    """Add adapters, and freeze everything else in the model.

    A ~ U(−1/√n, 1/√n) for n inputs, from (seed, name) alone, and B = 0: PEFT's distribution.

    Raises:
        ValueError: PEFT adapts no module of the stage.
    """
    from peft import inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reports how it treats GPT-2's transposed layers
            inject_adapter_in_model(peft_config(settings.rank), model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ValueError(f"blocks {span} cannot have LoRA with PEFT's default target_modules: {error}") from None
    for name, parameter in model.named_parameters():
        if name.endswith(_MATRIX_A):
            generator = torch.Generator().manual_seed(seed_of(settings.seed, name))
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)


def name_in_peft_file(parameter_name: str) -> str:
    """Return the name of an adapter's matrix in a PEFT file, given its name in a stage."""
    assert parameter_name.endswith((_MATRIX_A, _MATRIX_B))
    return "base_model.model." + parameter_name.replace(f".{ADAPTER}.weight", ".weight")
