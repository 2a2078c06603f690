"""Who accuses others wastes their time no more than any work does, and harms nobody who is honest."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.verification.evidence import new_seed, probe
from swarm_protocol.verification.statements import OutputStatement, Signer
from swarm_protocol.wire.codec import encode
from tests.attack.attacked import Attacked
from tests.attack.attacks import attack
from tests.quick_keys import new_identity
from tests.swarm.raw_client import Answer
from tests.zoo import HIDDEN

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
FLOOD = 100  # at a time


@attack("accusations without end")
def test_a_flood_of_accusations(target: Attacked) -> None:
    record, identity = target.record, new_identity()
    own = pb.ServerRecord(peer_id=identity.peer_id, model=record.model, revision=record.revision)
    own.quant, own.dtype, own.device = record.quant, record.dtype, record.device
    signer = Signer(identity, lambda: own, time.time)

    def accuse(_number: int) -> Answer:
        seed = new_seed()
        inputs = probe(seed, HIDDEN)
        statement = signer.sign(record.span, inputs, torch.zeros_like(inputs.hidden[0]))
        return target.attacker.ask("Accuse", pb.Evidence(statement=statement, seed=seed, hidden_size=HIDDEN))

    with ThreadPoolExecutor(FLOOD) as pool:
        accusing = [pool.submit(accuse, number) for number in range(FLOOD)]
        target.honest_client_goes_on()
        answers = [future.result() for future in accusing]
    assert {answer.status for answer in answers} == {INVALID}
    assert all("no server of this swarm" in answer.details for answer in answers)


@attack("an honest server is accused")
def test_what_an_honest_server_has_signed_does_not_harm_it(target: Attacked) -> None:
    """The attacker has it sign what it likes, and can only change that, or say it is about other inputs."""
    record, seed = target.record, new_seed()
    hidden, _ = encode(probe(seed, HIDDEN).hidden)
    answer = target.attacker.forward(
        pb.ForwardRequest(forward=pb.Forward(contract=target.contract(), hidden=hidden, sign=True))
    )
    assert answer.status is OK
    signed = answer.replies[0].statement
    assert OutputStatement.parse(signed).peer_id == record.peer_id
    content = pb.Statement.FromString(signed.content)
    content.sketch[0] += 1
    changed = pb.SignedStatement(
        content=content.SerializeToString(), signature=signed.signature, public_key=signed.public_key
    )
    stranger = new_identity()
    resigned = Signer(stranger, lambda: pb.ServerRecord(peer_id=record.peer_id), time.time).sign(
        record.span, probe(seed, HIDDEN), torch.zeros(16, HIDDEN)
    )
    named = pb.Statement.FromString(resigned.content)
    named.peer_id = record.peer_id
    resigned.content = named.SerializeToString()
    for statement, its_seed, expected in (
        (signed, seed, "this server itself"),
        (signed, new_seed(), "other inputs"),
        (changed, seed, "signature"),
        (resigned, seed, "another peer"),
    ):
        evidence = pb.Evidence(statement=statement, seed=its_seed, hidden_size=HIDDEN)
        answer = target.attacker.ask("Accuse", evidence)
        assert answer.status is INVALID and expected in answer.details
    target.honest_client_goes_on()
