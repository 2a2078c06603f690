"""Servers die while a client trains an adapter or generates with one: gradients and tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import get_peft_model

from swarm_client.transport.transport import ServerConnection
from tests.swarm.pair import random_ids
from tests.swarm.survival import SPANS, Client, Fleet, Moments
from tests.swarm.tuning import SEED, assert_close, lora, loss_of, padded_batch, trained, whole_model

BATCH = padded_batch()
MANY = padded_batch(rows=9, tokens=24)  # three micro-batches
IDS = random_ids(1, 10, seed=31)


@pytest.fixture
def adapted(fleet: Fleet, client: Client):
    """The whole model and the distributed one, with one adapter that does something."""
    local = get_peft_model(whole_model(fleet.model), lora()).eval()
    client.model.add_adapter(lora())
    for model in (local, client.model):
        torch.manual_seed(SEED)
        for parameter in trained(model):
            torch.nn.init.normal_(parameter, std=0.3)
    return local, client.model


@pytest.fixture
def assert_same_gradients(adapted) -> Callable[..., None]:
    def check(between: Callable[[], object] = lambda: None, batch: dict[str, torch.Tensor] = BATCH) -> None:
        for model, action in zip(adapted, (lambda: None, between), strict=True):
            model.zero_grad()
            loss = loss_of(**batch)(model)
            action()
            loss.backward()
        for local, remote in zip(*map(trained, adapted), strict=True):
            assert local.grad.abs().max() > 0
            assert_close(remote.grad, local.grad)

    return check


def used(fleet: Fleet, hop: int):
    return fleet.replicas(SPANS[hop])[0]


@pytest.mark.parametrize(
    "name",
    ["forward", pytest.param("backward", marks=pytest.mark.promise("a training pass survives the death of a server"))],
)
def test_killed_in_the_middle(fleet, assert_same_gradients, moments: Moments, name):
    victim = used(fleet, 1)
    moments.after_hop(name, 1, victim.kill)
    assert_same_gradients()
    assert not victim.alive


def test_killed_with_a_sum_that_it_has_not_handed_over(fleet, adapted, assert_same_gradients, monkeypatch):
    """All micro-batches have come back; what was added to the sum is computed by another server."""
    victim, take_sum, asked = used(fleet, 1), ServerConnection.take_sum, []

    async def killing(server: ServerConnection, *arguments):
        asked.append(server.record.peer_id)
        if server.record.peer_id == victim.peer_id:
            victim.kill()
        return await take_sum(server, *arguments)

    monkeypatch.setattr(ServerConnection, "take_sum", killing)
    assert_same_gradients(batch=MANY)
    assert not victim.alive and victim.peer_id in asked and len(asked) == len(SPANS)


def test_dropout_is_the_same_after_a_failure(fleet, client):
    client.model.add_adapter(lora(lora_dropout=0.5, init_lora_weights="orthogonal"))
    model, grads = client.model.train(), []
    for action in (lambda: None, lambda: used(fleet, 1).kill()):
        model.zero_grad()
        torch.manual_seed(1)
        loss = loss_of(**BATCH)(model)
        action()
        loss.backward()
        grads.append([parameter.grad.clone() for parameter in trained(model)])
    for first, second in zip(*grads, strict=True):
        assert first.abs().max() > 0
        assert_close(second, first)


def test_killed_in_generation(fleet, client, adapted, moments: Moments):
    local, remote = adapted
    known = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 12, "do_sample": False}
    expected = local.generate(input_ids=IDS, **known)
    moments.after_answer(4, lambda: client.kill(0))
    assert torch.equal(remote.generate(IDS, **known), expected)
    assert client.moved_blocks == ["0:2"]
    assert not torch.equal(expected, fleet.whole.generate(IDS, **known))
