"""Whose a session is, and whose share of the room: that of who has the key, whatever address they come from."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch

from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import decode
from swarm_protocol.wire.session_keys import push_key_of
from tests.quick_keys import new_identity
from tests.swarm.raw_client import Answer, RawClient, RawStream
from tests.swarm.target import INVALID, UNKNOWN, Target, wire

UNREACHABLE = grpc.StatusCode.UNAVAILABLE
NOBODY = pb.NextHop(peer_id="nobody", push_key=bytes(32))


@pytest.fixture(scope="module")
def stranger(idle_target) -> Iterator[RawClient]:
    """Another client, on the same machine."""
    with RawClient(idle_target.client.record, ClientCredentials(new_identity())) as client:
        yield client


@contextmanager
def session(target: Target) -> Iterator[tuple[bytes, RawStream]]:
    """The key of an open session, and its stream."""
    opening = target.open()
    with target.client.stream("Session") as stream:
        stream.send(opening)
        stream.read()
        yield opening.open.session_key, stream


def answers(client: RawClient, session_key: bytes) -> list[Answer]:
    """What the owner of a session may ask for."""
    return [
        client.ask("Progress", pb.ProgressRequest(session_key=session_key)),
        client.ask("Progress", pb.ProgressRequest(session_key=session_key, hold=True)),
        client.reroute(pb.RerouteRequest(session_key=session_key, next=NOBODY)),
        client.ask("Copy", pb.CopyRequest(session_key=session_key, to=NOBODY)),
    ]


def test_only_its_owner_asks_for_a_session(target, stranger):
    with session(target) as (key, stream):
        theirs, unknown = answers(stranger, key), answers(stranger, secrets.token_bytes(16))
        assert {answer.status for answer in theirs} == {UNKNOWN}
        assert [answer.details for answer in theirs] == [answer.details for answer in unknown]
        stream.send(target.step(number=1))  # it is not held
        assert torch.equal(decode(stream.read().output.hidden), target.expected)
        ours = [answer.status for answer in answers(target.client, key)]
        assert ours == [grpc.StatusCode.OK, INVALID, INVALID, UNREACHABLE]


def test_who_may_push_may_do_nothing_else(target, stranger):
    with session(target) as (key, stream):
        for client in (stranger, target.client):
            assert {answer.status for answer in answers(client, push_key_of(key))} == {UNKNOWN}
            assert client.push(pb.PushRequest(push_key=key)).status is UNKNOWN
        with stranger.stream("Push") as pushed:
            pushed.send(pb.PushRequest(push_key=push_key_of(key)))
            pushed.send(pb.PushRequest(step=pb.Step(number=1, hidden=wire(target.hidden))))
            assert pushed.read().number == 1
            assert torch.equal(decode(stream.read().output.hidden), target.expected)


def test_nobody_takes_the_push_key_of_a_session_that_is_still_to_be_opened(target, stranger):
    opening = target.open()
    taking = target.open(session_key=push_key_of(opening.open.session_key))
    with stranger.open_session(taking), target.client.stream("Session") as stream:
        stream.send(opening)
        assert stream.read().HasField("opened")
