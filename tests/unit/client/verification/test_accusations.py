"""Who lies is shown to others with evidence; what others say is believed only if still others compute it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from swarm_client.swarm.swarm import BlockTraits
from swarm_client.transport.wire_tensor import WireTensor
from swarm_client.verification.accusations import AccusationClient
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.net.identity import Identity
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.verification.comparison import RoundingKind
from swarm_protocol.verification.evidence import LASTS_S, Evidence, new_seed, probe
from swarm_protocol.verification.statements import Signer
from swarm_protocol.wire.block_input import BlockInput
from tests.quick_keys import new_identity
from tests.unit.client.verification.test_checks import HIDDEN, Lying, honest, scaled, true, zeros
from tests.unit.support import run, server_record


@pytest.fixture(scope="module")
def identities() -> Iterator[list[Identity]]:
    yield [new_identity() for _ in range(6)]


class World:
    """A swarm of servers, of which some lie, seen by one client; ``banned``: by it."""

    model, revision, traits, closed, sessions = "model", "revision", BlockTraits(HIDDEN), False, ()

    def __init__(self, identities: list[Identity], *blocks: str, lying: dict[int, Lying] | None = None) -> None:
        self.identities = identities[: len(blocks)]
        self.records = [
            server_record(identity.peer_id, span) for identity, span in zip(self.identities, blocks, strict=True)
        ]
        self.lying = {self.records[number].peer_id: lie for number, lie in (lying or {}).items()}
        self.banned: set[str] = set()
        self.accused: list[tuple[str, Evidence]] = []  # before whom
        self.published: list[tuple[str, pb.Evidence]] = []
        self.doubted: dict[str, list[str]] = {}  # by publisher
        self.told: list[tuple[str, str]] = []  # who was told of a doubt, about whom
        self.gone = ""
        self.unlisted = ""  # whose record cannot be read at present
        self.failures: list[str] = []
        self.heard: list[str] = []  # whom others doubt
        self.client = AccusationClient(self, self.heard.append)  # type: ignore[arg-type]

    def peer_id(self, number: int) -> str:
        return self.records[number].peer_id

    async def usable_servers(self) -> list[ServerRecord]:
        return [record for record in self._listed if record.peer_id not in self.banned]

    def record_of(self, peer_id: str) -> ServerRecord | None:
        return next((record for record in self._listed if record.peer_id == peer_id), None)

    @property
    def _listed(self) -> list[ServerRecord]:
        return [record for record in self.records if record.peer_id != self.unlisted]

    async def server(self, record: ServerRecord) -> Connection:
        return Connection(self, record)

    async def accusations(self) -> list[tuple[str, pb.Accusations]]:
        doubts = [(publisher, pb.Accusations(doubted=doubted)) for publisher, doubted in self.doubted.items()]
        return doubts + [(publisher, pb.Accusations(evidence=[evidence])) for publisher, evidence in self.published]

    def ban(self, peer_id: str) -> None:
        self.banned.add(peer_id)

    def is_banned(self, peer_id: str) -> bool:
        return peer_id in self.banned

    def failed(self, error: PeerUnavailable) -> None:
        self.failures.append(error.peer_id)

    def tell(self, number: int, span: str) -> bool:
        accusations = AccusationClient(self)  # type: ignore[arg-type]
        return run(accusations.tell(self.peer_id(number), Span.parse(span), HIDDEN))

    def read(self, publisher: int, *evidence: pb.Evidence) -> set[str]:
        """Have the client read what one server publishes; return whom it has banned then."""
        self.published = [(self.peer_id(publisher), each) for each in evidence]
        run(self.client.read())
        return self.banned

    def evidence(self, number: int, lie: Lying, span: str = "0:8") -> pb.Evidence:
        """What a server has signed when it lied."""
        seed, record, blocks = new_seed(), self.records[number], Span.parse(span)
        inputs = probe(seed, HIDDEN)
        signer = Signer(self.identities[number], record.to_proto, time.time)
        statement = signer.sign(blocks, inputs, lie(true(blocks, inputs.hidden[0])))
        return pb.Evidence(statement=statement, seed=seed, hidden_size=HIDDEN)


class Connection:
    def __init__(self, world: World, record: ServerRecord) -> None:
        self._world, self._record = world, record

    async def stated(self, span: Span, inputs: BlockInput, _: WireTensor) -> tuple[WireTensor, pb.SignedStatement]:
        world, record = self._world, self._record
        if record.peer_id == world.gone:
            raise PeerUnavailable("gone")
        output = world.lying.get(record.peer_id, honest)(true(span, inputs.hidden[0]))
        identity = world.identities[world.records.index(record)]
        return WireTensor.of(output[None]), Signer(identity, record.to_proto, time.time).sign(span, inputs, output)

    async def doubt(self, peer_id: str) -> None:
        if self._record.peer_id == self._world.gone:
            raise PeerUnavailable("gone")
        self._world.told.append((self._record.peer_id, peer_id))

    async def accuse(self, message: pb.Evidence) -> bool:
        evidence = Evidence.parse(message, time.time())
        self._world.accused.append((self._record.peer_id, evidence))
        output = true(evidence.statement.span, evidence.inputs.hidden[0])
        return (evidence.excess(output, RoundingKind("none", "float32"), False) or 0) >= 1


@pytest.mark.parametrize("lie", [scaled, zeros])
def test_a_liar_is_shown_to_those_who_can_tell(identities, lie: Lying) -> None:
    world = World(identities, "0:8", "0:4", "4:8", "6:8", lying={0: lie})
    assert world.tell(0, "2:8")
    heard = {judge: str(evidence.statement.span) for judge, evidence in world.accused}
    assert heard == {world.peer_id(1): "2:4", world.peer_id(2): "4:8", world.peer_id(3): "6:8"}
    assert all(evidence.statement.peer_id == world.peer_id(0) for _, evidence in world.accused)


def test_who_lies_no_more_when_asked_to_sign_is_not_shown(identities) -> None:
    world = World(identities, "0:8", "0:8")
    assert not world.tell(0, "0:8")


def test_who_signs_no_lie_and_whom_nobody_can_show_is_doubted(identities) -> None:
    """A server that fails is not told; those of models with experts sign nothing that shows a lie."""
    world = World(identities, "0:8", "0:8", "0:4", "4:8")
    world.gone = world.peer_id(3)
    world.tell(0, "0:8")
    assert sorted(world.told) == sorted((world.peer_id(number), world.peer_id(0)) for number in (1, 2))
    shown = World(identities, "0:8", "0:8", lying={0: zeros})
    assert shown.tell(0, "0:8") and not shown.told
    shown.traits = BlockTraits(HIDDEN, routed=True)
    assert not shown.tell(0, "0:8") and shown.told == [(shown.peer_id(1), shown.peer_id(0))] and len(shown.accused) == 1


def test_doubts_of_others_are_heard_and_ban_nobody(identities) -> None:
    """Not those of peers whose accusations were false, or about peers that are no servers."""
    world = World(identities, "0:8", "0:8", "0:8", "0:8")
    world.read(1, world.evidence(0, honest))
    world.doubted = {
        world.peer_id(1): [world.peer_id(2)],
        world.peer_id(2): [world.peer_id(0), world.peer_id(3), "nobody"],
        world.peer_id(3): [world.peer_id(0)],
    }
    assert not world.read(1)
    assert sorted(world.heard) == sorted([world.peer_id(0), world.peer_id(3)])


def test_one_that_lies_now_and_then_is_asked_until_it_signs_a_lie(identities) -> None:
    chance = random.Random(1)
    world = World(
        identities, "0:8", "0:8", lying={0: lambda output: zeros(output) if chance.random() < 0.1 else output}
    )
    assert all(world.tell(0, "0:8") for _ in range(4))
    assert len(world.accused) == 4


def test_one_that_has_gone_is_not_accused(identities) -> None:
    world = World(identities, "0:8", "0:8")
    world.gone = world.peer_id(0)
    assert not world.tell(0, "0:8") and not world.accused
    assert not run(AccusationClient(world).tell("unknown", Span(0, 8), HIDDEN))  # type: ignore[arg-type]


def test_a_false_accusation_bans_nobody_and_its_author_is_not_heard_again(identities) -> None:
    world = World(identities, "0:8", "0:8", "0:8", "0:8")
    assert not world.read(1, world.evidence(0, honest))
    assert not world.read(1, world.evidence(2, scaled))
    forged = world.evidence(0, scaled)
    forged.statement.signature = b"forged"
    assert not world.read(3, forged)


def test_who_publishes_what_has_expired_by_this_clock_is_heard_again(identities, monkeypatch) -> None:
    world, now = World(identities, "0:8", "0:8", "0:8"), time.time()
    monkeypatch.setattr(time, "time", lambda: now - LASTS_S - 1)
    expired = world.evidence(2, scaled)
    monkeypatch.undo()
    assert not world.read(1, expired)
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}


def test_a_liar_does_not_escape_by_leaving_while_its_evidence_is_read(identities) -> None:
    world = World(identities, "0:8", "0:8", "0:8", "0:8")
    world.unlisted = world.peer_id(0)
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}


def test_one_witness_that_lies_with_the_accused_silences_nobody(identities) -> None:
    """Of two witnesses it keeps the lie from being decided, so that the accused is doubted. Of four, three decide."""
    world = World(identities, "0:8", "0:8", "0:8", "0:8", lying={2: scaled})
    assert not world.read(1, world.evidence(0, scaled))
    assert world.heard == [world.peer_id(0)]
    world.lying = {}
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}
    world = World(identities, *["0:8"] * 6, lying={2: scaled})
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}


def test_a_single_witness_bans_only_with_an_accuser_that_has_the_blocks(identities) -> None:
    """Otherwise each of two servers could have the other one banned, as a stranger who accuses it."""
    world = World(identities, "0:8", "0:4", "0:8", lying={2: zeros})
    assert not world.read(1, world.evidence(0, honest))
    world = World(identities, "0:8", "0:8", "0:8")
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}


def test_witnesses_that_round_otherwise_do_not_silence_an_honest_accuser(identities) -> None:
    """They cannot see a small lie."""
    world = World(identities, "0:8", "0:8", "0:8", "0:8")
    exact = list(world.records)
    world.records[2:] = [replace(record, quant="int8") for record in exact[2:]]
    assert not world.read(1, world.evidence(0, scaled))
    world.records = exact
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}


def test_a_lie_that_only_just_shows_does_not_silence_an_honest_accuser(identities) -> None:
    """Others may find it a little smaller."""
    world = World(identities, "0:8", "0:8", "0:8", "0:8")
    kind = RoundingKind("none", "float32")
    shown = Evidence.parse(world.evidence(0, scaled), time.time())
    excess = shown.excess(true(shown.statement.span, shown.inputs.hidden[0]), kind, False)
    assert excess is not None and excess > 1
    assert not world.read(1, world.evidence(0, lambda output: (1 + 0.01 * 0.75 / excess) * output))
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}


def test_liars_who_confirm_a_false_accusation_need_to_lead(identities) -> None:
    world = World(identities, "0:8", "0:8", "0:8", "0:8", lying={2: zeros})
    assert not world.read(1, world.evidence(0, honest))


def test_a_witness_that_fails_is_left_out(identities) -> None:
    world = World(identities, "0:8", "0:8", "0:8", "0:8")
    world.gone = world.peer_id(2)
    assert world.read(1, world.evidence(0, scaled)) == {world.peer_id(0)}
    assert world.failures == [world.gone]


def test_an_accusation_without_an_answer_is_looked_into_three_times_and_only_a_few_at_a_time(identities) -> None:
    """The only witness is gone, so nothing comes of any of them."""
    world = World(identities, "0:8", "0:8", "0:8")
    world.gone = world.peer_id(2)
    accusations = [world.evidence(0, scaled) for _ in range(6)]
    for _ in range(8):
        num_asked = len(world.failures)
        assert not world.read(1, *accusations)
        assert len(world.failures) <= num_asked + 4
    assert len(world.failures) == 3 * 6


def test_nobody_is_asked_about_hidden_states_of_another_size(identities) -> None:
    """A stranger who has signed them would have each client send megabytes to each witness."""
    world = World(identities, "0:8", "0:8", "0:8")
    world.gone, world.unlisted = world.peer_id(2), world.peer_id(0)
    seed, signer = new_seed(), Signer(world.identities[0], world.records[0].to_proto, time.time)
    inputs = probe(seed, 2 * HIDDEN)
    statement = signer.sign(Span(0, 8), inputs, inputs.hidden[0])
    world.read(1, pb.Evidence(statement=statement, seed=seed, hidden_size=2 * HIDDEN))
    assert not world.failures
    world.read(1, world.evidence(0, zeros))
    assert world.failures == [world.gone]


def test_a_witness_that_comes_back_is_heard(identities) -> None:
    world = World(identities, "0:8", "0:8", "0:8")
    world.gone, accusation = world.peer_id(2), world.evidence(0, scaled)
    assert not world.read(1, accusation)
    world.gone = ""
    assert world.read(1, accusation) == {world.peer_id(0)}
