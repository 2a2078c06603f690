"""Robust runs over gRPC on loopback, several peers in one process, each in a thread of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from swarm_protocol.errors import AccessDenied, PeerUnavailable
from swarm_training.core.record import Progress
from swarm_training.core.robust_config import RobustConfig
from swarm_training.core.signing import read_signed
from swarm_training.pb import training_pb2 as pb
from swarm_training.robust.centered_clip import centered_clip
from swarm_training.robust.roster import Rules
from swarm_training.robust.workbench import Workbench
from swarm_training.robust_run.directory import PeerDirectory
from swarm_training.robust_run.presence import RobustPresence
from swarm_training.robust_run.robust_run import GlobalStep, RobustRun
from tests.marks import SLOW
from tests.worlds.identities import identity
from tests.worlds.runs import simulate

# Nobody waits for these, unless somebody is silent.
PATIENT = RobustConfig(compute_s=90.0, phase_s=60.0, spread_s=5.0)
LR, SHAPE = 0.05, (4, 3)
MANY_STEPS = 300  # in each of them the liar is audited with a chance of about 0.3


def data(step: int, peer: str) -> tuple[Tensor, Tensor]:
    """The batch that follows from both: inputs [8, 3] and targets [8, 4]."""
    seed = int.from_bytes(hashlib.sha256(f"{step}|{peer}".encode()).digest()[:6], "little")
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, SHAPE[1], generator=generator)
    return inputs, inputs @ torch.linspace(-1, 1, 12).reshape(SHAPE).T + 0.1 * torch.randn(8, 4, generator=generator)


class Flipped(Workbench):
    def gradient(self, step: int) -> Tensor:
        return -100 * super().gradient(step)


class Volunteer:
    """One peer with a linear model."""

    def __init__(self, number: int, count: int, initial_peers: list[str], config: RobustConfig, rules: Rules) -> None:
        self.parameter = torch.nn.Parameter(torch.full(SHAPE, float(number >= count)))
        self.history = [self.parameter.detach().clone()]
        self.run = RobustRun(
            "toy",
            [self.parameter],
            torch.optim.SGD([self.parameter], lr=LR),
            self.loss,
            founders=[identity(each).peer_id for each in range(count)],
            identity=identity(number),
            initial_peers=initial_peers,
            config=config,
            rules=rules,
        )

    def loss(self, step: int, peer: str) -> Tensor:
        inputs, targets = data(step, peer)
        return (inputs @ self.parameter.T - targets).square().mean()

    def advance(self, steps: int) -> list[GlobalStep]:
        done = []
        for _ in range(steps):
            done.append(self.run.advance())
            self.history.append(self.parameter.detach().clone())
        return done


@contextmanager
def volunteers(
    count: int, config: RobustConfig = PATIENT, rules: Rules | None = None
) -> Iterator[tuple[list[Volunteer], Callable[..., list[Any]]]]:
    """They, and what calls something for each of them at once."""
    peers: list[Volunteer] = []
    with ThreadPoolExecutor(count) as threads:
        try:
            for number in range(count):
                initial = peers[0].run.initial_peers if peers else []
                peers.append(Volunteer(number, count, initial, config, rules or Rules()))
            yield peers, lambda call, of: list(threads.map(call, of))
        finally:
            list(threads.map(lambda peer: peer.run.close(), peers))


def require_equal(peers: list[Volunteer]) -> None:
    for first, *others in zip(*(peer.history for peer in peers), strict=True):
        assert all(torch.equal(first, other) for other in others)


@SLOW
def test_four_honest_peers_equal_one_process_that_clips_the_same_gradients() -> None:
    with volunteers(4) as (peers, each):
        done = each(lambda peer: peer.advance(3), peers)
        require_equal(peers)
        assert [step.number for step in done[0]] == [1, 2, 3] and not any(step.removed for step in done[0])
    expected, last = torch.zeros(SHAPE), torch.zeros(12)
    for step, found in zip(done[0], peers[0].history[1:], strict=True):
        gradients = []
        for peer in step.workers:
            inputs, targets = data(step.number - 1, peer)
            gradients.append((2 * (inputs @ expected.T - targets).T @ inputs / targets.numel()).flatten())
        x = torch.stack(gradients)
        tau = float((x - last).norm(dim=1).quantile(0.5))
        last = torch.cat([centered_clip(part, torch.ones(len(x)), tau / 2) for part in x.tensor_split(4, 1)])
        expected = expected - LR * last.reshape(SHAPE)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_who_flips_gradients_is_banned_by_evidence_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with volunteers(5, rules=Rules(audit_share=0.5)) as (peers, each):
        liar = peers[2]
        bench = Flipped(liar.run.peer_id, 12, liar.run._gradients, liar.run._rules)
        monkeypatch.setattr(liar.run, "_make_bench", lambda: bench)
        honest = [peer for peer in peers if peer is not liar]

        def lie(peer: Volunteer) -> str:
            try:
                peer.advance(MANY_STEPS)
            except AccessDenied as error:
                return str(error)
            return ""

        def until_banned(peer: Volunteer) -> str:
            if peer is liar:
                return lie(peer)
            while not (removed := peer.advance(1)[0].removed):
                assert peer.run.num_steps < MANY_STEPS
            return f"{removed[0].peer}: {removed[0].reason}" if len(removed) == 1 else repr(removed)

        said = each(until_banned, peers)
        assert said.pop(2) == "this peer has been banned from the run: false gradient"
        assert set(said) == {f"{liar.run.peer_id}: false gradient"}
        require_equal(honest)
        assert all(sorted(peer.run.members) == sorted(each.run.peer_id for each in honest) for peer in honest)


@SLOW
def test_a_newcomer_joins_and_its_gradients_count_once_they_were_audited() -> None:
    rules = Rules(audit_share=0.5, audits_to_join=1)
    with volunteers(3, rules=rules) as (peers, _):
        newcomer = Volunteer(3, 3, peers[0].run.initial_peers, PATIENT, rules)

        def take_part(peer: Volunteer) -> list[GlobalStep]:
            done: list[GlobalStep] = []
            while len(done) < 60:
                done += peer.advance(1)
                if newcomer.run.peer_id in done[-1].workers:
                    return done
            return done

        everybody = [*peers, newcomer]
        try:
            with ThreadPoolExecutor(4) as threads:
                done = list(threads.map(take_part, everybody))
        finally:
            newcomer.run.close()
        assert all(steps[-1].number == done[0][-1].number for steps in done)
        assert not any(step.removed for step in done[0])
        lengths = len(newcomer.history) - 1  # its first state was its own
        assert 2 <= lengths < len(peers[0].history)
        for peer in peers:
            pairs = zip(peer.history[-lengths:], newcomer.history[-lengths:], strict=True)
            assert all(torch.equal(theirs, own) for theirs, own in pairs)


def test_founders_that_train_something_else_are_said_so() -> None:
    class SharedBoard:
        records: ClassVar[dict[str, pb.SignedProgress]] = {}

        async def publish(self, record: pb.SignedProgress) -> None:
            self.records[read_signed(record).peer_id] = record

        async def read(self) -> list[pb.SignedProgress]:
            return list(self.records.values())

        async def read_orders(self) -> list[bytes]:
            return []

    async def scenario() -> None:
        models = [b"a", b"b", b"a"]
        directories = []
        for number, model in enumerate(models):
            own = Progress("toy", identity(number).peer_id, model=model, address="host:1", tls_fingerprint=b"1")
            directories.append(PeerDirectory(own, identity(number), SharedBoard()))
        tasks = [asyncio.ensure_future(each.run()) for each in directories[:2]]
        presence = RobustPresence(RobustConfig(), cast(Any, None), directories[0], [], AsyncExitStack())
        founders = [identity(number).peer_id for number in range(3)]
        with pytest.raises(PeerUnavailable, match="2 of 3 founders have not come in time; 1 of them train another"):
            await presence.take_part(founders, lambda *_: pytest.fail("began"), lambda *_: pytest.fail("joined"))
        assert len(tasks) == 2

    simulate(scenario, 1000.0)


def test_mistakes_are_said_in_one_sentence() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def run(**changes: Any) -> RobustRun:
        options: dict[str, Any] = {"founders": [identity(0).peer_id], "identity": identity(0), **changes}
        return RobustRun("toy", [parameter], optimizer, lambda step, peer: parameter.sum(), **options)

    with pytest.raises(ValueError, match="no founder of the run: expected initial_peers"):
        run(founders=[identity(1).peer_id])
    with pytest.raises(ValueError, match="4 founders: expected 64 at most, and a parameter for each"):
        run(founders=[identity(number).peer_id for number in range(4)])
    with pytest.raises(ValueError, match="expected a list"):
        run(founders=identity(0).peer_id)
