"""Outputs go from server to server; through the client where servers cannot reach each other; never twice."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest
import torch

from swarm_client.transport.hops import HopOutput, HopSession
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.codec import decode
from swarm_protocol.wire.session_keys import push_key_of
from swarm_server.net.push import ChannelPool
from tests.swarm.pair import NEW_TOKENS, random_ids
from tests.swarm.target import CLOSE, INVALID, TOKENS, UNKNOWN, assert_close, assert_refused, header, wire
from tests.zoo import HIDDEN

SPANS = ("0:2", "2:5", "5:6")
HOPS, LAST = len(SPANS), Span.parse(SPANS[-1])
PROMPT = random_ids(2, 9, seed=0)
LONG = random_ids(1, 170, seed=1)  # comes in several chunks
REPETITIVE = random_ids(1, 6, seed=2).repeat(1, 3)
WAYS = {
    "greedy": (PROMPT, {"do_sample": False}),
    "beams": (PROMPT, {"num_beams": 3}),
    "chunks": (LONG, {"do_sample": False}),
    "speculation": (REPETITIVE, {"do_sample": False, "prompt_lookup_num_tokens": 3}),
}


@pytest.fixture
def sent(monkeypatch) -> Counter[int]:
    """How many steps the client sends to each hop."""
    counts: Counter[int] = Counter()
    send = HopSession.send

    async def counted(session: HopSession, step: pb.Step, parts) -> None:
        counts[session.number] += 1
        await send(session, step, parts)

    monkeypatch.setattr(HopSession, "send", counted)
    return counts


@pytest.fixture
def answers(monkeypatch) -> list[HopOutput]:
    """What the client is sent by all hops."""
    seen: list[HopOutput] = []
    read_event = HopSession._read_event

    async def watched(session: HopSession):
        event = await read_event(session)
        if isinstance(event, HopOutput):
            seen.append(event)
        return event

    monkeypatch.setattr(HopSession, "_read_event", watched)
    return seen


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.promise("servers push outputs to the next server")] * (way == "beams"))
        for way in WAYS
    ],
)
def test_outputs_do_not_pass_through_the_client(pair, sent, answers, way):
    ids, options = WAYS[way]
    whole, remote = pair.both(ids, **options)
    assert torch.equal(remote, whole)
    assert sent.keys() == {0}
    assert {answer.hop for answer in answers} == {HOPS - 1}
    if way in ("greedy", "chunks"):  # of each step the outputs of one position; of all chunks but the last none
        sizes = [answer.hidden.header.shape[1] for answer in answers if answer.hidden is not None]
        assert sizes == [1] * NEW_TOKENS and len(answers) == sent[0]


# ------------------------------------------------------------ through the client


@pytest.mark.parametrize(
    ("walled", "way"),
    [
        *(pytest.param({1, 2}, way, id=f"all-{way}") for way in WAYS),
        pytest.param({1}, "chunks", id="first-two-chunks"),
        pytest.param({2}, "speculation", id="last-two-speculation"),
    ],
)
def test_servers_that_cannot_reach_each_other(pair, sent, monkeypatch, way, walled):
    ids, options = WAYS[way]
    whole, direct = pair.both(ids, **options)
    num_steps = sent[0]
    sent.clear()
    peers = [record.peer_id for record in pair.servers.records()]
    stub = ChannelPool.stub

    async def walls(channels: ChannelPool, record: ServerRecord):
        if peers.index(record.peer_id) in walled:
            raise PeerUnavailable("a wall stands between")
        return await stub(channels, record)

    monkeypatch.setattr(ChannelPool, "stub", walls)
    _, remote = pair.both(ids, **options)
    assert torch.equal(direct, whole) and torch.equal(remote, whole)
    assert sent == {0: num_steps} | dict.fromkeys(walled, num_steps)


# ------------------------------------------------------------ streams that break


# ------------------------------------------------------------ what a server takes


def push(**fields) -> pb.PushRequest:
    return pb.PushRequest(step=pb.Step(**fields))


def test_an_unknown_session(target):
    answer = target.client.push(pb.PushRequest(push_key=bytes(32)))
    assert_refused(answer, UNKNOWN, "this server does not know the session")


@pytest.mark.parametrize("first", [push(number=1), pb.PushRequest(more=b"x"), pb.PushRequest()])
def test_a_stream_that_does_not_begin_with_its_session(target, first):
    answer = target.client.push(first)
    assert_refused(answer, INVALID, "expected a message of kind 'push_key'")


@pytest.mark.parametrize(
    ("requests", "sentence"),
    [
        ([pb.PushRequest()], "a request of unknown kind"),
        ([pb.PushRequest(more=b"x")], "without its beginning"),
        ([pb.PushRequest(push_key=bytes(32))], "a request of unknown kind"),
        ([push(hidden=header(1, 1, HIDDEN)), push()], "before all parts of the one before it"),
    ],
    ids=["nothing", "part-without-beginning", "another-session", "step-inside-a-step"],
)
def test_messages_that_make_no_sense_end_the_stream_and_not_the_session(target, requests, sentence):
    opening = target.open()
    with target.client.stream("Session") as session:
        session.send(opening)
        session.read()
        answer = target.client.push(pb.PushRequest(push_key=push_key_of(opening.open.session_key)), *requests)
        assert_refused(answer, INVALID, sentence)
        session.send(target.step(number=1))
        assert torch.equal(decode(session.read().output.hidden), target.expected)


def test_a_step_that_comes_twice_changes_nothing(target):
    """From the hop before, from the client, and while the other is still there."""
    opening, (first, rest) = target.open(reserve_tokens=TOKENS), target.hidden.split([4, TOKENS - 4], 1)
    one = pb.Step(number=1, hidden=wire(first))
    two = pb.Step(number=2, start_position=4, hidden=wire(rest))
    with target.client.stream("Session") as session, target.client.stream("Push") as pushed:
        session.send(opening)
        session.read()
        pushed.send(pb.PushRequest(push_key=push_key_of(opening.open.session_key)))
        for step in (one, one, two, one, two):
            pushed.send(pb.PushRequest(step=step))
        assert [pushed.read().number for _ in range(5)] == [1, 1, 2, 1, 2]  # taken, all of them
        for step in (one, two):
            session.send(pb.SessionRequest(step=step))
        session.send(CLOSE)
        replies = []
        while (reply := session.read()) is not grpc.aio.EOF:
            replies.append(reply)
    assert [reply.output.number for reply in replies] == [1, 2]
    outputs = torch.cat([decode(reply.output.hidden) for reply in replies], 1)
    assert_close(outputs, target.expected)


def test_a_refused_step_is_reported_to_the_client(target):
    opening = target.open()
    with target.client.stream("Session") as session, target.client.stream("Push") as pushed:
        session.send(opening)
        session.read()
        pushed.send(pb.PushRequest(push_key=push_key_of(opening.open.session_key)))
        pushed.send(push(number=1, hidden=header(1, 3, HIDDEN + 1)))
        failure = session.read().failure
        assert (failure.number, failure.status) == (1, INVALID.value[0])
        pushed.send(push(number=1, hidden=wire(target.hidden)))
        assert torch.equal(decode(session.read().output.hidden), target.expected)
