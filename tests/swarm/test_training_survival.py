"""Servers die while a client trains: loss and gradients stay those of the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.swarm.pair import random_ids
from tests.swarm.survival import SPANS, Client, Fleet

IDS = random_ids(2, 12, seed=30)


def loss_and_gradient(model: PreTrainedModel, between: Callable[[], object] = lambda: None):
    """The gradient of the embeddings; ``between`` is called between forward and backward."""
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_(True)
    loss = model(inputs_embeds=embeddings, labels=IDS).loss
    between()
    loss.backward()
    return loss.detach(), embeddings.grad


@pytest.fixture
def assert_same(fleet: Fleet, client: Client) -> Callable[..., None]:
    def check(between: Callable[[], object] = lambda: None) -> None:
        loss, gradient = loss_and_gradient(client.model, between)
        expected_loss, expected_gradient = loss_and_gradient(fleet.whole)
        assert torch.equal(loss, expected_loss)
        assert gradient.abs().max() > 0 and torch.equal(gradient, expected_gradient)

    return check


def used(fleet: Fleet, hop: int):
    """The server that computes these blocks as long as it is there."""
    return fleet.replicas(SPANS[hop])[0]


@pytest.mark.promise("a training pass survives the death of a server")
def test_killed_between_forward_and_backward(fleet, assert_same):
    assert_same(between=lambda: used(fleet, 1).kill())
