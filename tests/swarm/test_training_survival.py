"""Servers die while a client trains: loss and gradients stay those of the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.swarm.pair import random_ids
from tests.swarm.survival import SPANS, Client, Fleet, Moments

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


def test_everybody_is_gone_for_a_while(fleet, assert_same, moments: Moments):
    def gone() -> None:
        fleet.restart(fleet.kill_replicas("2:4")[0])

    moments.after_hop("forward", 1, gone)
    assert_same()


def test_every_hop_is_killed_once_in_training(fleet, client: Client, connect):
    """Several steps of a prompt that is tuned: the tuned prompt is the same."""
    tuned = []
    for model in (fleet.whole, client.model):
        prompt = torch.nn.Parameter(torch.zeros(1, 4, model.config.hidden_size))
        optimizer = torch.optim.SGD([prompt], lr=0.5)
        for step in range(6):
            if model is client.model and step % 2:
                used(fleet, step // 2).kill()
            embeddings = torch.cat([prompt.expand(2, -1, -1), model.get_input_embeddings()(IDS)], 1)
            labels = torch.cat([torch.full((2, 4), -100), IDS], 1)
            optimizer.zero_grad()
            model(inputs_embeds=embeddings, labels=labels).loss.backward()
            optimizer.step()
        tuned.append(prompt.detach())
    assert tuned[0].abs().max() > 0 and torch.equal(tuned[1], tuned[0])
