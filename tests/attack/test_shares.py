"""Whoever takes all there is has a share of it soon, and the honest client gets in."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import grpc
import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.adapters import Adapter, LowRank
from swarm_protocol.wire.codec import encode
from swarm_protocol.wire.constants import MIB
from swarm_protocol.wire.session_keys import push_key_of
from tests.attack.attacked import CACHE_TOKENS, INCOMING_BYTES, MAX_SESSIONS, Attacked
from tests.attack.attacks import attack
from tests.attack.test_messages import FULL, KEY, step
from tests.swarm.adapter_target import parts
from tests.swarm.raw_client import RawClient, RawStream
from tests.swarm.waiting import wait_for
from tests.zoo import HIDDEN, POSITIONS

OK = grpc.StatusCode.OK
FLOODS = 5  # what each of them would leave in memory adds up


Opening = Callable[[], pb.SessionRequest]


@contextmanager
def opened(clients: Sequence[RawClient], openings: Sequence[Opening]) -> Iterator[list[RawStream]]:
    """Every client's sessions, each with a key of its own; those refused have ended, others may still wait."""
    with ExitStack() as streams:
        yield [send(streams.enter_context(client.stream("Session")), make()) for make in openings for client in clients]


def send(stream: RawStream, request: pb.SessionRequest) -> RawStream:
    stream.send(request)
    return stream


def num_open(streams: Sequence[RawStream]) -> int:
    return sum(not stream.ended for stream in streams)


@attack("empty sessions in all places")
def test_empty_sessions_in_all_places(target: Attacked) -> None:
    empty = [partial(target.opening, wait_s=0.0)] * MAX_SESSIONS
    waiting = [partial(target.opening, wait_s=100.0)]
    with opened([target.attacker], empty) as streams:
        wait_for(lambda: num_open(streams) <= MAX_SESSIONS * 3 // 4, "one identity has a share")
        assert num_open(streams) > MAX_SESSIONS // 2
        target.honest_client_goes_on()
        inside = [stream for stream in streams if not stream.ended]
        for stream in inside:
            stream.read()  # that it is open: only then is it known when it ends
        with opened(target.others, waiting * MAX_SESSIONS):  # who has nothing may have the last place: all are taken
            wait_for(lambda: num_open(inside) < len(inside), "a session that never began gives its place")
            target.honest_client_goes_on()


@attack("sessions that promise themselves all room")
def test_sessions_that_promise_themselves_all_room(target: Attacked) -> None:
    """Ten of one client locked everybody out. A client without a session may have all that is left: here are four."""
    clients = [target.attacker, *target.others]
    promised = partial(target.opening, wait_s=100.0)
    quarter = partial(promised, reserve_tokens=POSITIONS, batch_size=CACHE_TOKENS // POSITIONS // 4)
    halves = [partial(promised, reserve_tokens=POSITIONS >> number) for number in range(len(clients) - 3)]
    with ExitStack() as streams:  # three quarters, and then one half of what is left after the other
        for client in clients[:3]:
            assert send(streams.enter_context(client.stream("Session")), quarter()).read().HasField("opened")
        for client, make in zip(clients[3:], halves, strict=True):
            send(streams.enter_context(client.stream("Session")), make())
        target.honest_client_goes_on(4)
    whole = partial(promised, reserve_tokens=POSITIONS, batch_size=CACHE_TOKENS // POSITIONS, age_s=1e30)
    with opened(clients[:4], [whole] * 8):  # all have waited longer than the honest client, by what they say
        target.honest_client_goes_on(4)


@pytest.mark.promise("a flood by one client does not keep others waiting")
@attack("a flood of passes")
def test_a_flood_of_passes(target: Attacked) -> None:
    hidden, more = encode(torch.ones(MIB // (4 * POSITIONS * HIDDEN) - 1, POSITIONS, HIDDEN))
    assert not more
    request = pb.ForwardRequest(forward=pb.Forward(contract=target.contract(), hidden=hidden))
    for _ in range(FLOODS):
        with opened_passes(target, request, 40) as flood:
            target.honest_client_goes_on()
            wait_for(partial(some_ended, flood), "there is no room for all of them")
            refused = [stream.answer() for stream in flood if stream.ended and stream.answer().status is FULL]
            held = [re.search(r"(\d+) of them by this client", answer.details) for answer in refused]
            assert held and all(one is not None and int(one[1]) <= INCOMING_BYTES * 3 // 4 for one in held)


@contextmanager
def opened_passes(target: Attacked, request: pb.ForwardRequest, number: int) -> Iterator[list[RawStream]]:
    with ExitStack() as streams:
        flood = [streams.enter_context(target.attacker.stream("Forward")) for _ in range(number)]
        for stream in flood:
            stream.send(request)
        yield flood


def some_ended(streams: Sequence[RawStream]) -> bool:
    return any(stream.ended for stream in streams)


@attack("stalled requests of one identity")
def test_stalled_requests_of_one_identity(target: Attacked) -> None:
    rows = INCOMING_BYTES // (4 * POSITIONS * HIDDEN)
    header = pb.Tensor(dtype=pb.FLOAT32, shape=[rows, POSITIONS, HIDDEN], size_bytes=INCOMING_BYTES)
    stalled = pb.ForwardRequest(forward=pb.Forward(contract=target.contract(), hidden=header))
    hidden, more = encode(torch.ones(2 * MIB // (4 * POSITIONS * HIDDEN), POSITIONS, HIDDEN))
    honest = [pb.ForwardRequest(forward=pb.Forward(contract=target.contract(), hidden=hidden))]
    honest += [pb.ForwardRequest(more=part) for part in more]
    with ExitStack() as streams:
        silent = [streams.enter_context(target.attacker.stream("Forward")) for _ in range(6)]
        for stream in silent:
            stream.send(stalled)
        for number in range(INCOMING_BYTES // MIB):
            silent[number % len(silent)].offer(pb.ForwardRequest(more=bytes(MIB)))
        wait_for(lambda: any(stream.ended for stream in silent), "one identity has no more room")
        assert target.others[0].forward(*honest).status is OK
        target.honest_client_goes_on()


@attack("adapters that are all in use")
def test_adapters_that_are_all_in_use(target: Attacked) -> None:
    def adapter() -> bytes:
        a, b = torch.zeros(220, HIDDEN), torch.zeros(HIDDEN, 220)
        return Adapter(secrets.token_bytes(16), (LowRank(2, "self_attn.q_proj", 1.0, a, b),)).serialize()[0]

    with ExitStack() as sessions:
        while (answer := target.attacker.put_adapter(*parts(adapter()))).status is OK:
            name = pb.AdapterName(key=answer.replies[0].key)
            sessions.enter_context(target.attacker.open_session(target.opening(adapter=name)))
        assert answer.status is FULL and "of them by this client" in answer.details
        honest = target.others[0]
        answer = honest.put_adapter(*parts(adapter()))
        assert answer.status is OK, answer
        target.honest_client_goes_on()


@attack("a next hop that is no server")
def test_a_next_hop_that_is_no_server(target: Attacked) -> None:
    """Servers connected to whatever host and port a client named, and told it whether anybody answered."""
    with socket.socket() as victim, target.attacker.stream("Session") as session:
        victim.bind(("127.0.0.1", 0))
        victim.listen()
        victim.setblocking(False)
        address = f"127.0.0.1:{victim.getsockname()[1]}"
        hop = pb.NextHop(peer_id=address, push_key=push_key_of(KEY))
        session.send(target.opening(KEY, next=hop))
        assert session.read().HasField("opened")
        session.send(step(1))
        assert session.read().output.relay, "the client passes on what the server cannot"
        target.honest_client_goes_on()
        try:
            victim.accept()
        except BlockingIOError:
            return
        raise AssertionError("the server has connected to an address that no record has")
