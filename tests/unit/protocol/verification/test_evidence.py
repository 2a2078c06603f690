"""Evidence shows lies, and cannot be made against who is honest."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import RoundingKind
from swarm_protocol.verification.evidence import LASTS_S, SEED_BYTES, Evidence, probe
from swarm_protocol.verification.statements import Signer
from swarm_protocol.wire.block_input import BlockInput
from tests.quick_keys import new_identity
from tests.unit.support import server_record

NOW, HIDDEN = 1_000_000.0, 48
SEED = bytes(range(SEED_BYTES))
SPAN = Span(0, 2)
WEIGHT = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5
KIND = RoundingKind("int8", "float32", "cpu")


def true(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.tanh(hidden @ WEIGHT)


INPUTS = probe(SEED, HIDDEN)
TRUTH = true(INPUTS.hidden[0])


@pytest.fixture(scope="module")
def signer() -> Iterator[Signer]:
    identity = new_identity()
    yield Signer(identity, server_record(identity.peer_id, quant="int8").to_proto, lambda: NOW)


def evidence(signer: Signer, output: torch.Tensor) -> Evidence:
    return Evidence.of(signer.sign(SPAN, INPUTS, output), SEED, HIDDEN, NOW)


def test_a_probe_is_about_normal_and_the_same_everywhere() -> None:
    hidden = INPUTS.hidden
    assert hidden.shape == (1, 16, HIDDEN)
    assert torch.equal(hidden, probe(SEED, HIDDEN).hidden)
    assert not torch.equal(hidden, probe(bytes(SEED_BYTES), HIDDEN).hidden)
    many = probe(SEED, 4096).hidden
    assert abs(float(many.mean())) < 0.02
    # four numbers from 0 to 255, divided by 128: sqrt(4 x (256² - 1) / 12) / 128
    assert float(many.std()) == pytest.approx((4 * (256**2 - 1) / 12) ** 0.5 / 128, rel=0.02)
    assert float(hidden[0, 0, 0]) == float(torch.tensor(hidden[0, 0, 0].item() * 128).round()) / 128


def test_the_truth_is_not_off(signer: Signer) -> None:
    assert evidence(signer, TRUTH).excess(TRUTH, KIND, False) == pytest.approx(0, abs=1e-4)


def test_rounding_is_no_lie(signer: Signer) -> None:
    noise = torch.randn(TRUTH.shape, generator=torch.Generator().manual_seed(3))
    honest = TRUTH + 0.0016 * (TRUTH - INPUTS.hidden[0]).norm(dim=-1, keepdim=True) * noise / HIDDEN**0.5
    excess = evidence(signer, honest).excess(TRUTH, KIND, False)
    assert excess is not None and excess < 0.5


@pytest.mark.parametrize("lie", [lambda x: 1.01 * x, torch.zeros_like, lambda x: x.roll(1, 0), lambda x: -x])
def test_lies_are_off(signer: Signer, lie) -> None:
    excess = evidence(signer, lie(TRUTH)).excess(TRUTH, KIND, False)
    assert excess is not None and excess > 1


def test_gross_lies_are_off_beside_another_kind_too(signer: Signer) -> None:
    other = RoundingKind("none", "float32", "cpu")
    found = evidence(signer, torch.zeros_like(TRUTH))
    assert (found.excess(TRUTH, other, False) or 0) > 1
    assert (evidence(signer, 1.01 * TRUTH).excess(TRUTH, other, False) or inf) < 1
    assert (found.excess(TRUTH, RoundingKind("nf4", "float32", "cpu"), False) or 0) > 1


def test_where_blocks_choose_among_experts_nothing_can_be_told(signer: Signer) -> None:
    assert evidence(signer, torch.zeros_like(TRUTH)).excess(TRUTH, KIND, True) is None


def test_other_inputs_than_those_of_the_seed_are_no_evidence(signer: Signer) -> None:
    chosen = BlockInput(1e6 * INPUTS.hidden)
    with pytest.raises(ValueError, match="other inputs"):
        Evidence.of(signer.sign(SPAN, chosen, TRUTH), SEED, HIDDEN, NOW)
    with pytest.raises(ValueError, match="other inputs"):
        Evidence.of(signer.sign(SPAN, INPUTS, TRUTH), bytes(SEED_BYTES), HIDDEN, NOW)


@pytest.mark.parametrize("now", [NOW + LASTS_S + 1, NOW - 61])
def test_it_expires(signer: Signer, now: float) -> None:
    with pytest.raises(ValueError, match="expired"):
        Evidence.of(signer.sign(SPAN, INPUTS, TRUTH), SEED, HIDDEN, now)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": b"short"}, "seed of 5 bytes"),
        ({"hidden_size": 0}, "of 0 numbers"),
        ({"hidden_size": 1 << 30}, "numbers"),
    ],
)
def test_what_is_none_is_refused(signer: Signer, fields: dict, expected: str) -> None:
    message = pb.Evidence(statement=signer.sign(SPAN, INPUTS, TRUTH), seed=SEED, hidden_size=HIDDEN)
    for name, value in fields.items():
        setattr(message, name, value)
    with pytest.raises(ValueError, match=expected):
        Evidence.parse(message, NOW)
