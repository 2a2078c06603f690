"""Muon with AdamW, beside torch's two optimizers on the same parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from swarm_training.commands.building import build_optimizer
from swarm_training.optim.muon import MuonWithAdamW
from swarm_training.runfile.settings import OptimizerSettings

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
LR, DECAY = 0.01, 0.1


class Model(nn.Module):
    """An embedding, a hidden layer and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden, self.head = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 5)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.table(ids)))


def train(model: Model, *optimizers: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        ids = torch.arange(5).roll(step)
        nn.functional.cross_entropy(model(ids), ids.flip(0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def built(model: Model) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerSettings("muon", LR, weight_decay=DECAY, decay_vectors=False), model)


def equal(one: Model, other: Model) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_hidden_matrices_step_as_with_torchs_muon_and_others_as_with_its_adamw() -> None:
    ours, theirs = Model(), Model()
    muon = torch.optim.Muon([theirs.hidden.weight], LR, DECAY, adjust_lr_fn="match_rms_adamw")
    vectors = [theirs.hidden.bias, theirs.head.bias]
    tables = [theirs.table.weight, theirs.head.weight]
    adamw = torch.optim.AdamW([{"params": tables}, {"params": vectors, "weight_decay": 0.0}], LR, weight_decay=DECAY)
    train(ours, built(ours))
    train(theirs, muon, adamw)
    assert equal(ours, theirs)


def test_a_loaded_state_goes_on_as_the_one_that_was_saved() -> None:
    whole, resumed = Model(), Model()
    optimizer = built(whole)
    train(whole, optimizer)
    later = built(resumed)
    resumed.load_state_dict(whole.state_dict())
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(whole, optimizer)
    train(resumed, later)
    assert equal(whole, resumed)


def test_a_closure_and_vectors_as_hidden_matrices_are_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match="expected none"):
        built(model).step(lambda: 0.0)
    with pytest.raises(ValueError, match="2D"):
        MuonWithAdamW([{"params": [model.hidden.bias], "is_hidden": True}])


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one that is trained"):
        MuonWithAdamW([])
