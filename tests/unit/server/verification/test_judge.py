"""A server believes what it has computed itself: lies are published, and honest servers are not harmed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from swarm_protocol.dht.notices.accusations import MAX_DOUBTED
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import RequestRejected
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.evidence import LASTS_S, new_seed, probe
from swarm_protocol.verification.statements import Signer
from swarm_protocol.wire.block_input import BlockInput
from swarm_server.verification.blocklist import Blocklist
from swarm_server.verification.judge import AnswerJudge
from tests.quick_keys import new_identity
from tests.unit.support import run, server_record

HIDDEN, SPAN = 32, Span(0, 4)
CLIENT = Caller("client")
WEIGHT = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5


def true(_span: Span, inputs: BlockInput) -> torch.Tensor:
    return inputs.hidden + torch.tanh(inputs.hidden @ WEIGHT)


class Board:
    """The accusations in the DHT."""

    def __init__(self) -> None:
        self.others: list[tuple[str, pb.Evidence]] = []
        self.published: list[pb.Evidence] = []
        self.doubted: list[str] = []
        self.times = 0

    async def read(self) -> list[tuple[str, pb.Accusations]]:
        return [(publisher, pb.Accusations(evidence=[evidence])) for publisher, evidence in self.others]

    async def publish(self, evidence: list[pb.Evidence], doubted: list[str], _token: bytes) -> bool:
        self.published, self.doubted, self.times = evidence, doubted, self.times + 1
        return True


class Scheduler:
    """``clients``: for whom it has worked."""

    def __init__(self) -> None:
        self.clients: list[str] = []

    async def train(self, compute, client: Caller, _num_positions: int) -> torch.Tensor:
        self.clients.append(client.peer_id)
        return compute()


class World:
    """One judge, over blocks 0:4."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.board, self.scheduler, self.blocklist = Board(), Scheduler(), Blocklist(lambda: self.now)
        engine = SimpleNamespace(hidden_size=HIDDEN, stateless=SimpleNamespace(forward=true))
        services = SimpleNamespace(engine=engine, scheduler=self.scheduler, neighbours=self)
        self.strangers: set[str] = set()
        self.record = server_record("judge")
        self.judge = AnswerJudge(
            lambda: services,  # type: ignore[arg-type,return-value]
            lambda: self.record,
            False,
            self.board,  # type: ignore[arg-type]
            b"",
            self.blocklist,
            lambda: self.now,
        )

    async def knows(self, peer_id: str) -> bool:
        return peer_id not in self.strangers

    def judge_all(self, *evidence: pb.Evidence) -> list[bool]:
        """What comes of it, once all that is to be published was published."""

        async def judge() -> list[bool]:
            shown = [await self.judge.judge(one, CLIENT) for one in evidence]
            if self.judge._publishing is not None:
                await self.judge._publishing
            return shown

        return run(judge())

    def evidence(
        self, identity: Identity, lie=lambda output: output, span: Span = SPAN, record: ServerRecord | None = None
    ) -> pb.Evidence:
        """What a server signs that makes this of its output."""
        seed = new_seed()
        inputs = probe(seed, HIDDEN)
        record = record or server_record(identity.peer_id, "0:8")
        statement = Signer(identity, record.to_proto, lambda: self.now).sign(span, inputs, lie(true(span, inputs))[0])
        return pb.Evidence(statement=statement, seed=seed, hidden_size=HIDDEN)


@pytest.fixture(scope="module")
def accused() -> Iterator[Identity]:
    yield new_identity()


def test_who_lies_is_published_once(accused: Identity) -> None:
    world = World()
    evidence = world.evidence(accused, lambda output: 1.01 * output)
    again = world.evidence(accused, torch.zeros_like)
    assert world.judge_all(evidence, evidence, again) == [True] * 3
    assert accused.peer_id in world.blocklist
    assert world.board.published == [evidence] and world.board.times == 1
    assert world.scheduler.clients == ["client"]  # it is work for who accuses, and done once


def test_who_is_honest_is_not_harmed(accused: Identity) -> None:
    world = World()
    assert world.judge_all(world.evidence(accused)) == [False]
    assert accused.peer_id not in world.blocklist and not world.board.published


def test_what_was_shown_is_published_until_it_has_expired(accused: Identity) -> None:
    world = World()
    evidence = world.evidence(accused, torch.zeros_like)
    world.judge_all(evidence)
    run(world.judge.publish())
    assert world.board.times == 2
    world.now += LASTS_S + 1
    run(world.judge.publish())
    assert world.board.times == 2 and accused.peer_id not in world.blocklist


def test_what_others_publish_is_judged_too(accused: Identity) -> None:
    world, honest = World(), new_identity()
    lie, truth = world.evidence(accused, torch.zeros_like), world.evidence(honest)
    elsewhere = world.evidence(honest, torch.zeros_like, Span(2, 8))
    world.board.others = [("slanderer", truth), ("other", elsewhere), ("judge", pb.Evidence()), ("honest", lie)]
    run(world.judge.judge_others())
    assert world.board.published == [lie]
    assert accused.peer_id in world.blocklist and honest.peer_id not in world.blocklist


def test_a_server_that_publishes_much_cannot_keep_the_evidence_of_others_from_being_judged(accused: Identity) -> None:
    world = World()
    lie = world.evidence(accused, torch.zeros_like)
    world.board.others = [*[("liar", pb.Evidence())] * 8, ("honest", lie)]
    for _ in range(100):
        run(world.judge.judge_others())
        if accused.peer_id in world.blocklist:
            break
    assert world.board.published == [lie]


def test_what_cannot_be_judged_is_refused(accused: Identity) -> None:
    world = World()
    forged = world.evidence(accused, torch.zeros_like)
    forged.statement.signature = b"forged"
    wide = probe(seed := new_seed(), 2 * HIDDEN)
    signer = Signer(accused, server_record(accused.peer_id).to_proto, lambda: world.now)
    statement = signer.sign(SPAN, wide, wide.hidden[0])
    for evidence, expected in (
        (forged, "signature"),
        (pb.Evidence(), "no range of blocks"),
        (world.evidence(accused, torch.zeros_like, Span(2, 6)), "other blocks"),
        (
            world.evidence(accused, torch.zeros_like, record=replace(server_record(accused.peer_id), model="x")),
            "another model",
        ),
        (pb.Evidence(statement=statement, seed=seed, hidden_size=2 * HIDDEN), "another size"),
    ):
        with pytest.raises(RequestRejected, match=expected):
            run(world.judge.judge(evidence, CLIENT))
    world.strangers = {accused.peer_id}
    with pytest.raises(RequestRejected, match="no server of this swarm"):
        run(world.judge.judge(world.evidence(accused, torch.zeros_like), CLIENT))
    world.record = replace(world.record, peer_id=accused.peer_id)
    with pytest.raises(RequestRejected, match="itself"):
        run(world.judge.judge(world.evidence(accused, torch.zeros_like), CLIENT))
    assert not world.scheduler.clients and not world.board.published


def test_doubts_of_clients_are_published_for_a_while_and_an_address_counts_once() -> None:
    """However many identities are behind it. No proof is asked for, and nobody is left out."""
    world = World()

    def doubt(peer_id: str, number: int, address: str) -> None:
        run(world.judge.doubt(peer_id, Caller(f"client {number}", address)))

    for number in range(100):
        doubt("slandered", number, "192.0.2.1")
    doubt("liar", 0, "192.0.2.2")
    doubt("liar", 0, "192.0.2.3")
    for number in range(100):  # names more servers than it may
        doubt(f"slandered {number}", number, "192.0.2.1")
    run(world.judge.publish())
    assert world.board.doubted[0] == "liar" and "slandered" in world.board.doubted and len(world.board.doubted) == 5
    assert not world.board.published and "liar" not in world.blocklist and not world.scheduler.clients
    world.now += 3601
    run(world.judge.publish())
    assert world.board.times == 1


def test_two_strangers_cannot_keep_a_doubt_from_being_published() -> None:
    """They name as many servers as are published, before the doubt comes: it is published now and then."""
    world = World()
    for number in range(MAX_DOUBTED):
        run(world.judge.doubt(f"slandered {number}", Caller("stranger", f"192.0.2.{number // 4}")))
    run(world.judge.doubt("liar", Caller("client", "192.0.2.9")))

    def published() -> list[str]:
        run(world.judge.publish())
        return world.board.doubted[:MAX_DOUBTED]

    assert any("liar" in published() for _ in range(100))


def test_callers_without_an_address_count_as_one() -> None:
    world = World()
    for number in range(100):
        run(world.judge.doubt(f"slandered {number % 8}", Caller(f"stranger {number}")))
    for number in range(2):
        run(world.judge.doubt("liar", Caller("client", f"192.0.2.{number}")))
    run(world.judge.publish())
    assert world.board.doubted[0] == "liar" and len(world.board.doubted) == 5


def test_only_other_servers_of_the_swarm_can_be_doubted() -> None:
    """What is no name at all is not looked for: megabytes of it would wait for a reading of the DHT."""
    world = World()
    world.strangers = {"stranger"}
    unknown = "no server of this swarm"
    for peer_id, expected in (("stranger", unknown), ("x" * 513, unknown), ("judge", "itself")):
        with pytest.raises(RequestRejected, match=expected):
            run(world.judge.doubt(peer_id, CLIENT))
    run(world.judge.publish())
    assert not world.board.times
