"""Requests no honest client sends: each is refused with one sentence, and the server lives on."""

from __future__ import annotations

import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.constants import WIRE_VERSION
from tests.swarm.target import BAD_INPUTS, INVALID, MOVED, TOKENS, assert_refused, filled, header, wire
from tests.zoo import HIDDEN

pytestmark = pytest.mark.promise("a request that is wrong is refused in one sentence, and the server goes on")


BAD_PACKING = {"packed": True, "attention_mask": pb.AttentionMask()}, "by their positions: expected no attention mask"


@pytest.mark.parametrize("name", [*BAD_INPUTS, "packed"])
def test_hidden_states_masks_and_positions(target, name):
    fields, sentence = BAD_INPUTS.get(name, BAD_PACKING)
    answer = target.client.forward(pb.ForwardRequest(forward=target.forward(**fields)))
    assert_refused(answer, INVALID, sentence)


BAD_CONTRACTS = {
    "wire-version": (
        {"wire_version": WIRE_VERSION + 1},
        MOVED,
        f"speaks wire version {WIRE_VERSION}, the client {WIRE_VERSION + 1}: update the older",
    ),
    "blocks-before": ({"blocks": pb.Span(start=0, end=5)}, MOVED, "holds blocks 1:5, not 0:5"),
    "no-blocks": ({"blocks": pb.Span(start=3, end=3)}, INVALID, "blocks 3:3 are no range of blocks"),
    "nothing-at-all": ({"blocks": None}, INVALID, "blocks 0:0 are no range of blocks"),
}


@pytest.mark.parametrize("name", BAD_CONTRACTS)
def test_contracts(target, name):
    fields, status, sentence = BAD_CONTRACTS[name]
    contract = target.contract(**fields)
    client, forward = target.client, target.forward(contract=contract)
    for answer in (
        client.forward(pb.ForwardRequest(forward=forward)),
        client.backward(pb.BackwardRequest(forward=forward)),
        client.session(target.open(contract=contract)),
    ):
        assert_refused(answer, status, sentence)


def test_messages_out_of_turn(target):
    client, forward = target.client, target.forward()
    for answer, expected in (
        (client.forward(pb.ForwardRequest(more=b"1234")), "forward"),
        (client.forward(pb.ForwardRequest()), "forward"),
        (client.forward(pb.ForwardRequest(forward=target.forward(header(1, 1, HIDDEN))), pb.ForwardRequest()), "more"),
        (client.backward(pb.BackwardRequest(forward=forward), pb.BackwardRequest(forward=forward)), "grad"),
    ):
        assert_refused(answer, INVALID, f"expected a message of kind '{expected}'")


@pytest.mark.parametrize(
    ("grad", "sentence"),
    [
        (wire(torch.zeros(1, TOKENS + 1, HIDDEN)), r"gradient has shape \[1, 7, 64\]: .* \[1, 6, 64\]"),
        (header(1, TOKENS, HIDDEN, dtype=pb.INT64), "expected float32, bfloat16 or float16"),
        (wire(filled(float("nan"))), "the gradients sent are not finite"),
    ],
    ids=["shape", "dtype", "nan"],
)
def test_gradients(target, grad, sentence):
    forward = pb.BackwardRequest(forward=target.forward())
    answer = target.client.backward(forward, pb.BackwardRequest(grad=grad))
    assert_refused(answer, INVALID, sentence)
