"""Adapters over the wire: put, named, computed with, their gradients sent back, refused, forgotten."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import grpc
import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank, Prompt
from swarm_protocol.wire.codec import decode
from tests.swarm.adapter_target import HOSTED, OK, Target, adapter_target, parts, random
from tests.swarm.target import CLOSE, FULL, INVALID, assert_close, assert_refused, wire
from tests.swarm.waiting import wait_for
from tests.zoo import HIDDEN

pytestmark = pytest.mark.promise("adapters that do not fit, or are not there, are refused in one sentence")

SHARE = 201_000  # bytes of adapters that one client may have
BUDGET = SHARE * 4 // 3
MISSING = grpc.StatusCode.ABORTED


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("adapted")
    with adapter_target(directory, adapters=(directory / "poet",), adapter_bytes=BUDGET, chunk_tokens=16) as target:
        yield target


def test_a_name_of_the_server_s_own(target):
    record = target.client.describe()
    assert record.adapters == ("poet",)
    name, hidden, grad = pb.AdapterName(name="poet"), random(2, 6, HIDDEN), random(2, 6, HIDDEN, seed=1)
    assert_close(target.output(hidden, name), target.local.run(HOSTED, hidden))
    (actual,) = target.gradients(hidden, grad, name)
    assert_close(actual, target.local.gradients(HOSTED, hidden, grad)[0])


def test_sessions(target):
    adapter = target.adapter()
    prompted = Adapter(adapter.salt, adapter.low_rank[:2], (Prompt(2, random(4, HIDDEN, seed=3)),))
    hidden = random(1, 6, HIDDEN)
    steps = [
        pb.SessionRequest(step=pb.Step(number=1, start_position=0, hidden=wire(hidden[:, :3]))),
        pb.SessionRequest(step=pb.Step(number=2, start_position=3, hidden=wire(hidden[:, 3:]))),
    ]
    for name in (None, target.put(adapter), pb.AdapterName(name="poet"), target.put(prompted)):
        key = secrets.token_bytes(16)
        opening = pb.Open(contract=target.contract(), session_key=key, batch_size=1, adapter=name)
        answer = target.client.session(pb.SessionRequest(open=opening), *steps, CLOSE)
        assert answer.status is OK, answer
        outputs = [decode(reply.output.hidden) for reply in answer.replies[1:]]
        assert_close(torch.cat(outputs, 1), target.output(hidden, name))


def big() -> Adapter:
    """Takes more than half of a client's share."""
    return Adapter(
        secrets.token_bytes(16), (LowRank(2, "self_attn.q_proj", 1.0, torch.zeros(220, 64), torch.zeros(64, 220)),)
    )


def test_a_session_keeps_its_adapter(target):
    name = target.put(big())
    opening = pb.Open(contract=target.contract(), session_key=secrets.token_bytes(16), batch_size=1, adapter=name)
    with target.client.open_session(pb.SessionRequest(open=opening)):
        answer = target.client.put_adapter(*parts(big().serialize()[0]))
        assert_refused(answer, FULL, f"no room for .* of {BUDGET} bytes are in use")
        target.output(random(1, 3, HIDDEN), name)
    other = big()
    wait_for(lambda: target.client.put_adapter(*parts(other.serialize()[0])).status is OK, "the session is closed")
    target.output(random(1, 3, HIDDEN), pb.AdapterName(key=other.serialize()[1]))
    answer = target.client.forward(pb.ForwardRequest(forward=target.forward(random(1, 3, HIDDEN), name)))
    assert (answer.replies, answer.status) == ([], MISSING)


UNKNOWN = {
    "key": (pb.AdapterName(key=bytes(32)), MISSING, "does not have the adapter"),
    "name": (pb.AdapterName(name="cook"), INVALID, "has loaded no adapter 'cook': expected one of its own, poet"),
    "long name": (pb.AdapterName(name="c" * 10_000), INVALID, "has loaded no adapter 'ccc"),
    "neither": (pb.AdapterName(), INVALID, "neither key nor name"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_adapters(target, kind):
    name, status, sentence = UNKNOWN[kind]
    hidden = random(1, 3, HIDDEN)
    opening = pb.Open(contract=target.contract(), session_key=secrets.token_bytes(16), batch_size=1, adapter=name)
    for answer in (
        target.client.forward(pb.ForwardRequest(forward=target.forward(hidden, name))),
        target.client.backward(pb.BackwardRequest(forward=target.forward(hidden, name))),
        target.client.session(pb.SessionRequest(open=opening)),
    ):
        assert_refused(answer, status, sentence)


def test_streams_that_are_refused(target):
    data = target.adapter().serialize()[0]
    low_rank = LowRank(2, "self_attn.q_proj", 1.0, torch.zeros(2, 64), torch.zeros(64, 2))
    for requests, sentence in (
        ([], "salt has 0 bytes"),
        ([pb.PutAdapterRequest()], "a part of the adapter is empty"),
        ([*parts(data)[:-1], pb.PutAdapterRequest(part=data[:-1])], "cannot be read"),
        (parts(data + b"1"), "cannot be read"),
        (parts(bytes(SHARE + 1)), f"larger than {SHARE} bytes"),
        (parts(Adapter(bytes(16), (low_rank, low_rank)).serialize()[0]), "has low-rank matrices twice"),
        (parts(target.local.adapter(Span(0, 3)).serialize()[0]), "is for block 0, but this server holds blocks 1:5"),
        (parts(Adapter(bytes(3), (low_rank,)).serialize()[0]), "salt has 3 bytes"),
    ):
        answer = target.client.put_adapter(*requests)
        assert_refused(answer, INVALID, sentence)
    target.put(target.adapter())
