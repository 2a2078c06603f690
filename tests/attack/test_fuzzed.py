"""Messages, records and files that were changed at random are refused, or answered rightly; nothing is left of them."""

from __future__ import annotations

import random

import grpc
import pytest
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import encode
from swarm_protocol.wire.session_keys import push_key_of
from tests.attack.attacked import Attacked
from tests.attack.attacks import attack
from tests.attack.fuzzed import fuzz
from tests.attack.fuzzing.conversations import RPCS, conversation
from tests.attack.fuzzing.honest_requests import HonestRequests
from tests.attack.fuzzing.records import RECORDS
from tests.unit.support import server_record
from tests.zoo import HIDDEN

SEED = 15
NEVER_RIGHT = ("Accuse", "Doubt", "GetPiece")  # there is nobody else to accuse, and this server offers no files


@attack("a few hundred fuzzed messages")
def test_a_few_hundred(target: Attacked) -> None:
    fuzzer = fuzz(target, SEED, 300)
    assert fuzzer.failures == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_thousand(target: Attacked) -> None:
    fuzzer = fuzz(target, SEED + 1, 20_000)
    assert fuzzer.failures == []
    assert {*RPCS, *RECORDS} < set(fuzzer.tallies)
    for kind in RPCS:  # some were right, and some were not
        answers = fuzzer.tallies[kind].answers
        assert answers["OK"] > 2 or kind in NEVER_RIGHT, (kind, answers)
        assert answers.total() - answers["OK"] > 10, (kind, answers)


def test_outputs_that_are_to_be_sent_again_as_whole_numbers(target: Attacked) -> None:
    key, hidden = bytes(range(16)), encode(torch.ones(1, 1, HIDDEN))[0]
    nowhere = pb.NextHop(peer_id="nobody", push_key=push_key_of(key))
    opening = target.opening(key, next=nowhere, codec=pb.INT8_BLOCKS)
    resent = pb.Step(number=1, hidden=pb.Tensor(dtype=pb.INT64, shape=[1, 1, HIDDEN]))
    with target.attacker.stream("Session") as session:
        session.send(opening)
        session.read()
        session.send(pb.SessionRequest(step=pb.Step(number=1, hidden=hidden)))
        session.read()
        answer = target.attacker.reroute(pb.RerouteRequest(session_key=key, next=nowhere, resend=[resent]))
        assert answer.status is grpc.StatusCode.INVALID_ARGUMENT and "no floating-point tensor" in answer.details


def test_outputs_in_a_codec_that_there_is_not(running: Attacked) -> None:
    answer = running.attacker.session(running.opening(codec=77))
    assert answer.status is grpc.StatusCode.INVALID_ARGUMENT and answer.details.startswith("codec 77 is unknown")


@pytest.mark.parametrize("kind", RECORDS)
def test_records(kind: str) -> None:
    answers = {RECORDS[kind](random.Random(f"{SEED}/{number}")) for number in range(200)}
    assert "accepted" in answers and len(answers) > 1


def test_a_number_stands_for_the_same_messages_every_time() -> None:
    honest = HonestRequests(server_record(tls_fingerprint=b"f" * 32), HIDDEN)

    def said(number: int) -> list[list[bytes]]:
        return [call.data for call in conversation(honest, random.Random(f"{SEED}/{number}")).calls]

    assert [said(number) for number in range(50)] == [said(number) for number in range(50)]
    assert len({str(said(number)) for number in range(50)}) > 40
