"""What arrives from others about rollbacks is checked before it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pytest

from swarm_protocol.errors import PeerUnavailable, RequestRejected
from swarm_training.averaging.group import Group
from swarm_training.checkpoints.state_file import StateFile
from swarm_training.core.config import MAX_MEMBERS, MAX_WINDOW, RollbackPolicy
from swarm_training.core.moment import Moment
from swarm_training.core.record import MEETING
from swarm_training.core.signing import sign
from swarm_training.meeting.attending import Ballots, WentBack
from swarm_training.pb import training_pb2 as pb
from swarm_training.run.transfer.receiving import download, download_checkpoint
from tests.marks import IN_VIRTUAL_TIME
from tests.unit.training.test_records import record
from tests.worlds.identities import identity
from tests.worlds.runs import CONFIG, SimulatedPeer, World
from tests.worlds.virtual_time import at_once

pytestmark = IN_VIRTUAL_TIME


@dataclass
class Giving:
    """A network on which everybody gives the same."""

    header: pb.StateHeader
    data: bytes

    async def state(self, peer: object, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
        self.header.size_bytes = len(self.data)
        yield pb.StatePart(header=self.header)
        yield pb.StatePart(data=self.data)


def giving(number: int, **fields: Any) -> tuple[SimulatedPeer, Any]:
    peer = SimulatedPeer.make(World(), number, target=4)
    state = peer.state
    header = pb.StateHeader(parameters=state.shapes, optimizer=state.optimizer_name, common=state.common, **fields)
    return peer, Giving(header, b"".join(state.snapshot()[1].parts()))


def test_a_checkpoint_is_taken_only_if_it_is_the_one() -> None:
    peer, network = giving(1)
    digest = peer.state.digest()
    data = asyncio.run(download_checkpoint(network, peer.peer.own, peer.state, digest, at_once))
    peer.state.go_to(Moment(1, 0), data)
    assert peer.state.digest() == digest and peer.state.moment == Moment(1, 0)
    for wrong in (b"", network.data[:-1], giving(2)[1].data):
        network.data = wrong
        with pytest.raises(ValueError, match=r"another checkpoint|no safetensors file"):
            asyncio.run(download_checkpoint(network, peer.peer.own, peer.state, digest, at_once))


def test_a_peer_that_ends_its_answer_at_once_gives_no_state() -> None:
    class Silent(Giving):
        async def state(self, peer: object, request: pb.StateRequest) -> AsyncIterator[pb.StatePart]:
            for part in ():
                yield part

    peer, network = giving(1)
    with pytest.raises(PeerUnavailable, match="nothing of its state"):
        asyncio.run(download(Silent(network.header, b""), peer.peer.own, peer.state, at_once))


@pytest.mark.parametrize(
    "fields",
    [
        {"usual_losses": [2.0, inf]},
        {"usual_losses": [2.0] * (MAX_WINDOW + 1)},
        {"step": 3, "went_back_to": 4},
        {"roster": []},
    ],
)
def test_a_history_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    peer, network = giving(1, **{"roster": ["x"], "step": 5, **fields})
    with pytest.raises(PeerUnavailable, match=r"too many, or not finite|that no group can have decided"):
        asyncio.run(download(network, peer.peer.own, peer.state, at_once))
    right = asyncio.run(download(giving(1, roster=["x"])[1], peer.peer.own, peer.state, at_once))
    assert right.arrival.roster == ("x",)


def group(go_back: pb.Rollback, step: int = 20) -> pb.Group:
    member = pb.Member(record=sign(record(1, step=step), identity(1)), weight=1, share=1.0)
    return pb.Group(
        id="g", step=step, ballot=1, members=[member], deadline_s=5.0, layout=[1.0], roster=["x"], go_back=go_back
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 21},
        {"state_digest": b"short"},
        {"order": b"x" * 5000},
        {"losses": [pb.SignedProgress()] * (MAX_MEMBERS + 1)},
    ],
)
def test_a_group_that_goes_back_to_nowhere_is_none(changes: dict[str, Any]) -> None:
    right = {"step": 18, "state_digest": b"d" * 32}
    assert Group.parse(group(pb.Rollback(**right))).next_moment == Moment(1, 18)
    with pytest.raises(ValueError, match="a group"):
        Group.parse(group(pb.Rollback(**{**right, **changes})))


def test_a_rollback_that_a_peer_has_accepted_is_its_result() -> None:
    """Also where the leader has gone before it said so, and another peer's record confirms it."""
    ballots, state = Ballots(), StateFile.of(b"state")
    assert ballots.result is None
    accepted = Group.parse(group(pb.Rollback(step=18, state_digest=b"d" * 32)))
    ballots.accept(accepted, b"digest", 0, state=state)
    assert ballots.result == WentBack(state, b"digest", accepted)


async def test_a_member_does_not_go_back_to_another_state_than_its_own_nor_by_losses_that_nobody_signed() -> None:
    config = replace(CONFIG, checkpoint_every=10, rollback=RollbackPolicy())
    world = World()
    world.dead.add(identity(1).peer_id)
    peer = SimulatedPeer.make(world, 0, target=4, config=config)
    kept = peer.peer.rollbacks.kept
    kept.keep(10, b"d" * 32, StateFile.of(b"state"))
    own = replace(record(0, step=20), state_digest=b"n" * 32)
    lost = record(1, step=20, state=MEETING, loss=inf, loss_samples=1)
    evidence = sign(lost, identity(1))

    async def asked(step: int, digest: bytes, losses: pb.SignedProgress = evidence) -> bytes | None:
        parsed = Group.parse(group(pb.Rollback(step=step, state_digest=digest, losses=[losses])))
        view = replace(peer.peer.view(), own=own)
        state = await peer.peer.rollbacks.checkpoint(parsed, own, [lost.peer_id], view)
        return None if state is None else b"".join(state.parts())

    assert await asked(10, b"d" * 32) == b"state" and await asked(20, b"n" * 32) is None
    for step, digest in ((10, b"e" * 32), (20, b"e" * 32)):
        with pytest.raises(RequestRejected, match="another checkpoint than that of this peer"):
            await asked(step, digest)
    with pytest.raises(PeerUnavailable, match="no peer gives the checkpoint"):
        await asked(0, b"z" * 32)
    forged = pb.SignedProgress(progress=evidence.progress, public_key=evidence.public_key, signature=b"x")
    with pytest.raises(ValueError, match="sign"):
        await asked(10, b"d" * 32, forged)
    usual = sign(replace(lost, loss=2.0), identity(1))
    with pytest.raises(RequestRejected, match="without a reason"):
        await asked(10, b"d" * 32, usual)
