from __future__ import annotations

import pytest
import torch
from torch import nn

from swarm_training.optim.by_name import optimizer_by_name
from swarm_training.optim.lamb import LAMB
from swarm_training.optim.offload import AdamW8bit, LAMB8bit
from swarm_training.runfile.settings import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_of_run_files_steps(name: str) -> None:
    parameter = nn.Parameter(torch.ones(8))
    optimizer = optimizer_by_name(name, [parameter], lr=0.1, weight_decay=0.0)
    assert type(optimizer) is {"lamb": LAMB, "lamb8bit": LAMB8bit, "adamw8bit": AdamW8bit}.get(name, type(optimizer))
    parameter.grad = torch.ones(8)
    optimizer.step()
    assert bool((parameter < 1).all())


def test_unknown_names_and_options_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(8))
    with pytest.raises(ValueError, match="optimizer 'adam' is unknown: expected one of adamw, sgd"):
        optimizer_by_name("adam", [parameter], lr=0.1)
    with pytest.raises(ValueError, match="lamb does not take these options"):
        optimizer_by_name("lamb", [parameter], lr=0.1, momentum=0.9)
