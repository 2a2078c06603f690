"""Statements are those of who has signed them, and sketches tell how far apart two outputs are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm_protocol.net.identity import Identity
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import RoundingKind
from swarm_protocol.verification.statements import (
    DIRECTIONS,
    SKETCH_POSITIONS,
    OutputStatement,
    Signer,
    digest_of,
    sketch_of,
)
from swarm_protocol.wire.block_input import BlockInput
from tests.quick_keys import new_identity
from tests.unit.support import server_record

NOW = 1_000_000.0
SPAN = Span(0, 4)
INPUTS = BlockInput(torch.randn(1, 20, 24, generator=torch.Generator().manual_seed(0)))
OUTPUT = torch.randn(20, 24, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def identity() -> Iterator[Identity]:
    yield new_identity()


@pytest.fixture
def signed(identity: Identity) -> pb.SignedStatement:
    record = server_record(identity.peer_id, quant="int8")
    return Signer(identity, record.to_proto, lambda: NOW).sign(SPAN, INPUTS, OUTPUT)


def test_says_who_has_computed_what(identity: Identity, signed: pb.SignedStatement) -> None:
    statement = OutputStatement.parse(signed)
    assert statement.is_by(server_record(identity.peer_id, quant="int8"), SPAN)
    assert statement.is_about(INPUTS, OUTPUT)
    assert (statement.kind, statement.made_at) == (RoundingKind("int8", "float32", "cpu"), NOW)


def test_is_about_nothing_else(identity: Identity, signed: pb.SignedStatement) -> None:
    statement, record = OutputStatement.parse(signed), server_record(identity.peer_id, quant="int8")
    assert not statement.is_about(INPUTS, 1.0001 * OUTPUT)
    for other in (
        replace(INPUTS, hidden=INPUTS.hidden.nextafter(torch.tensor(9.0))),
        replace(INPUTS, attention_mask=torch.ones(1, 20)),
        replace(INPUTS, position_ids=torch.arange(20)[None]),
        replace(INPUTS, packed=True),
    ):
        assert not statement.is_about(other, OUTPUT)
    assert not statement.is_by(record, Span(0, 3))
    for fields in ({"model": "x"}, {"revision": "x"}, {"quant": "nf4"}, {"dtype": "bfloat16"}, {"device": "cuda"}):
        assert not statement.is_by(replace(record, **fields), SPAN)


@pytest.mark.parametrize(
    "change",
    [
        *({field: "else"} for field in ("peer_id", "model", "revision", "quant", "dtype", "device")),
        {"sketch": [1.0] * DIRECTIONS},
        {"made_at": NOW + 1},
        {"input_digest": b"x"},
        {"blocks": pb.Span(end=3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_was_changed_is_not_signed(signed: pb.SignedStatement, change: dict[str, Any]) -> None:
    content = pb.Statement.FromString(signed.content)
    for field in change:
        content.ClearField(field)
    content.MergeFrom(pb.Statement(**change))
    with pytest.raises(ValueError, match="peer" if "peer_id" in change else "signature"):
        OutputStatement.parse(pb.SignedStatement(content=content.SerializeToString(), **rest(signed)))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.SignedStatement(content=b"\xff"), "cannot be read"),
        (pb.SignedStatement(content=b"x" * 5000), "too long"),
        (pb.SignedStatement(), "no range of blocks"),
        (pb.SignedStatement(content=pb.Statement(blocks=pb.Span(end=1)).SerializeToString()), "sketch of 0"),
        (
            pb.SignedStatement(
                content=pb.Statement(blocks=pb.Span(end=1), sketch=[float("nan")] * DIRECTIONS).SerializeToString()
            ),
            "not finite",
        ),
        (
            pb.SignedStatement(
                content=pb.Statement(blocks=pb.Span(end=1), sketch=[1.0] * DIRECTIONS).SerializeToString(),
                public_key=b"no key",
            ),
            "no RSA key",
        ),
    ],
)
def test_what_is_none_is_refused(message: pb.SignedStatement, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        OutputStatement.parse(message)


def test_projections_have_the_length_of_what_is_projected() -> None:
    """Johnson and Lindenstrauss: on average over directions, here 400 times 8, with a standard error of 2.5 %."""
    output = torch.randn(1, 100, generator=torch.Generator().manual_seed(2))
    squares = [sketch_of(output, bytes([k % 256, k // 256])).square().mean() for k in range(400)]
    assert float(torch.stack(squares).mean()) == pytest.approx(float(output.double().square().sum()), rel=0.1)
    assert sketch_of(OUTPUT, b"").shape == (SKETCH_POSITIONS, DIRECTIONS)


def test_the_digest_of_a_mask_is_that_of_what_it_attends_to() -> None:
    mask = torch.ones(1, 20)
    assert digest_of(replace(INPUTS, attention_mask=mask)) == digest_of(replace(INPUTS, attention_mask=mask.bool()))


def rest(signed: pb.SignedStatement) -> dict[str, bytes]:
    return {"signature": signed.signature, "public_key": signed.public_key}
