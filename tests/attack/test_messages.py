"""Messages that would take a server's memory, time or log are refused, while an honest client's tokens stay right."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode, encode
from swarm_protocol.wire.constants import MAX_RESENT, MAX_RESENT_STEPS, MAX_TENSOR_BYTES, MIB
from swarm_protocol.wire.session_keys import push_key_of
from tests.attack.attacked import INCOMING_BYTES, Attacked
from tests.attack.attacks import attack
from tests.swarm.raw_client import Answer
from tests.swarm.waiting import wait_for
from tests.zoo import HIDDEN, POSITIONS

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
UNKNOWN = grpc.StatusCode.NOT_FOUND
TYPES = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name
MANY = 100_000
KEY = bytes(range(16))


def step(number: int, start: int = 0, num_tokens: int = 1, **fields: object) -> pb.SessionRequest:
    hidden = encode(torch.ones(1, num_tokens, HIDDEN))[0]
    return pb.SessionRequest(step=pb.Step(number=number, start_position=start, hidden=hidden, **fields))


def assert_refused(answer: Answer, status: grpc.StatusCode, sentence: str) -> None:
    assert answer.status is status, answer
    assert sentence in answer.details and answer.details.isprintable() and len(answer.details) < 500, answer


@attack("very many empty changes")
def test_empty_changes(target: Attacked) -> None:
    attacker = target.attacker
    answer = attacker.session(target.opening(), step(1, changes=[pb.Change()] * MANY))
    assert_refused(answer, INVALID, "very many fields")
    few = attacker.session(target.opening(), step(1, changes=[pb.Change()] * 9), pb.SessionRequest(close=pb.Close()))
    assert "9 changes: expected at most 8" in few.replies[1].failure.message
    too_large = pb.SessionRequest(more=bytes(4 * MIB)).SerializeToString()
    assert_refused(attacker.send_bytes("Session", too_large), FULL, "SERVER: Received message larger than max")


@attack("reroutes of very many steps")
def test_reroutes_of_very_many_steps(target: Attacked) -> None:
    attacker = target.attacker
    first = pb.RerouteRequest(
        session_key=KEY, next=pb.NextHop(push_key=push_key_of(KEY)), resend=[pb.Step()] * MAX_RESENT
    )
    with attacker.open_session(target.opening(KEY, next=pb.NextHop(push_key=push_key_of(KEY)))):
        many = pb.RerouteRequest(session_key=KEY, resend=[pb.Step()] * MANY)
        assert_refused(attacker.reroute(many), INVALID, "very many fields")
        some = pb.RerouteRequest(session_key=KEY, resend=[pb.Step()] * (MAX_RESENT + 1))
        assert_refused(attacker.reroute(some), INVALID, f"{MAX_RESENT + 1} steps are in one message")
        too_many = [first] * (MAX_RESENT_STEPS // MAX_RESENT + 1)
        answer = attacker.reroute(*too_many)
        assert answer.status in (INVALID, FULL) and "bytes" in answer.details


@attack("streams that fall silent or drip")
def test_streams_that_fall_silent_or_drip(target: Attacked) -> None:
    """Each had up to 256 MiB, for as long as it liked; the rest of the room is the honest client's."""
    attacker = target.attacker
    num_tokens = MAX_TENSOR_BYTES // (4 * HIDDEN) // POSITIONS
    header = pb.Tensor(dtype=pb.FLOAT32, shape=[num_tokens, POSITIONS, HIDDEN], size_bytes=MAX_TENSOR_BYTES)
    forward = pb.ForwardRequest(forward=pb.Forward(contract=target.contract(), hidden=header))
    header = pb.Tensor(dtype=pb.FLOAT32, shape=[1, 64, HIDDEN], size_bytes=4 * 64 * HIDDEN)
    dripping = pb.SessionRequest(step=pb.Step(number=1, hidden=header))
    with ExitStack() as streams:
        drip = streams.enter_context(attacker.stream("Session"))
        drip.send(target.opening())
        drip.read()  # gRPC knows how a stream has ended once all is read
        drip.send(dripping)
        silent = [streams.enter_context(attacker.stream("Forward")) for _ in range(6)]
        for stream in silent:
            stream.send(forward)
        for number in range(2 * INCOMING_BYTES // MIB):
            silent[number % len(silent)].offer(pb.ForwardRequest(more=bytes(MIB)))
        wait_for(lambda: sum(stream.ended for stream in silent) > 0, "there is no room for all of them")
        answers = [stream.answer() for stream in silent]
        for answer in answers:
            no_room = answer.status is FULL
            assert_refused(
                answer, FULL if no_room else UNKNOWN, "requests that are arriving" if no_room else "came too slowly"
            )
        assert {answer.status for answer in answers} == {UNKNOWN, FULL}
        wait_for(lambda: drip.offer(pb.SessionRequest(more=b"x")), "a stream that drips has ended")
        assert drip.answer().status is UNKNOWN


@pytest.mark.parametrize("method", TYPES)
def test_bytes_that_are_no_message(running: Attacked, method: str) -> None:
    answer = running.attacker.send_bytes(method, b"\xff\xfe\n\x1b[2J")
    assert_refused(answer, INVALID, f"the bytes sent are no message: expected a {TYPES[method].input_type.name}")
    assert "Traceback" not in running.server.stderr


@attack("text that would steer a log")
def test_text_that_would_steer_a_log_or_terminal(target: Attacked) -> None:
    attacker, evil = target.attacker, "evil\n00:00:00 all is well \x1b[2J"
    model = target.opening(contract=target.contract(model=evil * 1000))
    assert_refused(attacker.session(model), grpc.StatusCode.FAILED_PRECONDITION, r"expects evil\n00:00:00 all")
    hop = pb.NextHop(peer_id=evil, push_key=push_key_of(KEY))
    close = pb.SessionRequest(close=pb.Close())
    attacker.session(target.opening(next=hop), step(1), close)
    wait_for(lambda: "the swarm has no record of it" in target.server.stderr, "the server has logged it")
    assert r"\x1b[2J" in target.server.stderr
    assert "\n00:00:00" not in target.server.stderr and "\x1b[2J" not in target.server.stderr


@attack("a step numbered far ahead")
def test_a_step_that_is_numbered_far_ahead(target: Attacked) -> None:
    attacker, close = target.attacker, pb.SessionRequest(close=pb.Close())
    expected = attacker.session(target.opening(), step(1, num_tokens=3), step(2, 3), close).replies[2]
    with attacker.stream("Session") as session:
        session.send(target.opening(KEY))
        session.read()
        session.send(step(1, num_tokens=3))
        session.read()
        for number in (2**64 - 1, 2**63, 1 << 40):
            push = pb.PushRequest(step=step(number, 3).step)
            answer = attacker.push(pb.PushRequest(push_key=push_key_of(KEY)), push)
            assert_refused(answer, INVALID, f"step {number} is far ahead of the session's last one, 1")
        session.send(step(2, 3))
        found, wanted = decode(session.read().output.hidden), decode(expected.output.hidden)
        # float32 products of a batch that the honest client's step may share differ from those of one row by rounding
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        session.send(close)
        assert session.answer().status is grpc.StatusCode.OK
