"""Forward passes that servers keep for their backward: the same gradients, once, and only as long as there is room."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch

from swarm_client.swarm.swarm import Swarm
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_server.training.training_memory import TrainingMemory
from tests.swarm.adapter_target import HOSTED, Target, adapter_target, random, tensors
from tests.swarm.pair import Pair, random_ids
from tests.swarm.target import INVALID, MOVED, assert_refused, wire
from tests.swarm.tuning import assert_close, lora, trained
from tests.zoo import HIDDEN

SPANS = ("0:2", "2:6")

FORGOTTEN = grpc.StatusCode.ABORTED
HIDDEN_STATES, GRAD = random(5, 6, HIDDEN), random(5, 6, HIDDEN, seed=1)


def new_key() -> bytes:
    return secrets.token_bytes(16)


# ------------------------------------------------------------ over the wire


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    with adapter_target(tmp_path_factory.mktemp("kept"), chunk_tokens=16) as target:  # in pieces of two rows
        yield target


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_are_those_of_a_pass_that_is_recomputed(target, dropout):
    adapter = target.local.adapter(HOSTED, salt=new_key(), dropout=dropout)
    name, key, seed = target.put(adapter), new_key(), 3
    output, kept = target.kept_output(key, HIDDEN_STATES, name, dropout_seed=seed)
    assert kept
    assert_close(output, target.output(HIDDEN_STATES, name, dropout_seed=seed))
    found = tensors(target.go_back(key, GRAD))
    expected = target.gradients(HIDDEN_STATES, GRAD, name, dropout_seed=seed)
    assert len(found) == 1 + 2 * 2 * len(HOSTED) and all(map(torch.equal, found, expected))
    again = target.go_back(key, GRAD)
    assert_refused(again, FORGOTTEN, "does not have the pass")


def test_only_who_knows_the_key_goes_back(target):
    key = new_key()
    target.kept_output(key, HIDDEN_STATES)
    assert target.go_back(new_key(), GRAD).status is FORGOTTEN
    assert target.go_back(b"", GRAD).status is FORGOTTEN
    contract = target.contract()
    contract.revision = "another"
    other = pb.BackwardRequest(kept=pb.KeptForward(contract=contract, key=key))
    assert target.client.backward(other, pb.BackwardRequest(grad=wire(GRAD))).status is MOVED
    assert target.go_back(key, GRAD).status is grpc.StatusCode.OK


@pytest.mark.parametrize("length", [5, 65])
def test_the_length_of_keys(target, length):
    answer = target.client.forward(pb.ForwardRequest(forward=target.forward(HIDDEN_STATES, keep_key=bytes(length))))
    assert_refused(answer, INVALID, f"has {length} bytes: expected 16 to 64")


# ------------------------------------------------------------ a client's


class Spy:
    """Counts the passes that servers keep and take, in the order of blocks' ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[bytes] = []
        self.taken: list[bytes] = []
        self.memories: set[TrainingMemory] = set()
        keep, taking = TrainingMemory.keep, TrainingMemory.taking

        def spied_keep(memory: TrainingMemory, key: bytes, *arguments) -> bool:
            self.memories.add(memory)
            self.kept.append(key)
            return keep(memory, key, *arguments)

        @contextmanager
        def spied_taking(memory: TrainingMemory, key: bytes):
            with taking(memory, key) as take:
                yield lambda: self.taken.append(key) or take()

        monkeypatch.setattr(TrainingMemory, "keep", spied_keep)
        monkeypatch.setattr(TrainingMemory, "taking", spied_taking)

    def forget(self) -> None:
        for memory in self.memories:
            while memory.reclaim():
                pass


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


IDS = random_ids(3, 12, seed=0)


def embedded(model) -> torch.Tensor:
    return model.get_input_embeddings()(IDS).detach().requires_grad_(True)


def expected_gradient(pair: Pair) -> torch.Tensor:
    inputs = embedded(pair.whole)
    pair.whole(inputs_embeds=inputs).logits.square().mean().backward()
    return inputs.grad


def test_every_server_on_the_way_keeps_its_part(pair, spy):
    inputs = embedded(pair.remote)
    pair.remote(inputs_embeds=inputs).logits.square().mean().backward()
    assert_close(inputs.grad, expected_gradient(pair))
    assert len(spy.kept) == 2 and spy.taken == spy.kept[::-1]


def test_what_servers_forget_they_compute_again(pair, spy):
    inputs = embedded(pair.remote)
    loss = pair.remote(inputs_embeds=inputs).logits.square().mean()
    spy.forget()
    loss.backward()
    assert_close(inputs.grad, expected_gradient(pair))
    assert len(spy.kept) == 2 and not spy.taken


def test_a_pass_that_is_reclaimed_when_it_was_just_found_is_computed_again(pair, spy, monkeypatch):
    """Room may be needed between the look at a pass and its use: no failure of the server, nor of the step."""
    look, banned = TrainingMemory.look, []

    def look_and_lose(memory: TrainingMemory, *which):
        found = look(memory, *which)
        while memory.reclaim():
            pass
        return found

    monkeypatch.setattr(TrainingMemory, "look", look_and_lose)
    monkeypatch.setattr(Swarm, "failed", lambda swarm, error: banned.append(error))
    inputs = embedded(pair.remote)
    pair.remote(inputs_embeds=inputs).logits.square().mean().backward()
    assert_close(inputs.grad, expected_gradient(pair))
    assert len(spy.kept) == 2 and not banned


def test_nothing_is_kept_without_gradients(pair, spy):
    with torch.no_grad():
        pair.remote(input_ids=IDS)
    pair.remote.model.embed_tokens.requires_grad_(False)
    try:
        pair.remote(input_ids=IDS)
    finally:
        pair.remote.model.embed_tokens.requires_grad_(True)
    assert not spy.kept


def test_nothing_is_kept_where_the_pass_back_does_not_come(pair, spy):
    pair.remote.add_adapter(lora(r".*layers\.[35]\.self_attn\.q_proj"))
    try:
        for _ in range(2):  # B begins with zeros: the first step gives A no gradient
            pair.remote(input_ids=IDS).logits.square().mean().backward()
        assert all(parameter.grad is not None for parameter in trained(pair.remote.model.layers))
        assert len(spy.kept) == 2 and spy.taken == spy.kept  # the server of blocks 2:6, twice
    finally:
        pair.remote.delete_adapter("default")
