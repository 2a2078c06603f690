"""Swarms of honest peers and attackers: who is removed, and what the others get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.marks import SLOW
from tests.unit.test_architecture import POLICY_IMPORTS, impurities

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "benchmarks"))

from btard_swarm import (  # noqa: E402
    DIMENSIONS,
    KINDS,
    Collusion,
    Delivery,
    LargeSignFlip,
    NoReveal,
    OpenShift,
    Peer,
    SignFlip,
    Swarm,
    noisy_gradients,
)

from swarm_training.robust.centered_clip import centered_clip  # noqa: E402
from swarm_training.robust.messages import Commitment  # noqa: E402
from swarm_training.robust.roster import Rules  # noqa: E402

NAMES = [f"p{number}" for number in range(10)]
ATTACKERS = {"p1", "p4", "p7"}
BANNED = {  # proven to lie; the others are silent, or complain too often
    *("sign flip", "sign flip × 1000", "shift, open", "shift, hidden by its own projection", "equivocation"),
    *("shift, hidden by an accomplice", "false projections", "slander", "collusion of validators and jury"),
}
PURE = ["attempt", "btard", "instructions", "jury", "messages", "phases", "roster"]


def swarm(kind: type[Peer] = Peer, seed: int = 0, rules: Rules | None = None, start: int = 0) -> Swarm:
    kinds = {name: kind if name in ATTACKERS else Peer for name in NAMES}
    return Swarm(kinds, noisy_gradients(seed=seed), DIMENSIONS, seed, rules, start)


def assert_of_one_mind(peers: Swarm) -> None:
    """All honest peers have the same result and the same view of the others."""
    first, *others = peers.honest
    for name in others:
        assert torch.equal(peers.benches[name].result, peers.benches[first].result)
        assert peers.machines[name].roster.standings == peers.machines[first].roster.standings
        assert peers.machines[name].removed == peers.machines[first].removed


@pytest.mark.parametrize("kind", KINDS)
def test_attackers_are_out_within_30_steps_and_nobody_else(kind: str) -> None:
    peers = swarm(KINDS[kind], start=2)
    while not peers.removed.keys() >= ATTACKERS and peers.step_number < 32:
        peers.step()
        assert_of_one_mind(peers)
    assert peers.removed.keys() == ATTACKERS
    assert {removed.is_banned for removed in peers.removed.values()} == {kind in BANNED}
    assert min(removed.step for removed in peers.removed.values()) >= 2
    peers.step()
    assert_of_one_mind(peers)


@pytest.mark.parametrize("steps", [20, pytest.param(500, marks=pytest.mark.long)])
def test_honest_peers_are_never_removed(steps: int) -> None:
    peers = swarm(seed=1)
    for _ in range(steps):
        peers.step()
        assert_of_one_mind(peers)
    assert peers.removed == {}


def test_the_result_is_centered_clip_of_what_the_workers_computed() -> None:
    gradient_of = noisy_gradients(seed=3)
    peers = Swarm(dict.fromkeys(NAMES, Peer), gradient_of, DIMENSIONS, seed=3)
    last = torch.zeros(DIMENSIONS)
    for step in range(3):
        validators = set(peers.machines["p0"].snapshot().audits)
        assert len(validators) == (2 if step else 0), "of the last step"
        result = peers.step()
        x = torch.stack([gradient_of(name, step) for name in NAMES if name not in validators])
        tau = float((x - last).norm(dim=1).quantile(0.5))
        parts = zip(x.tensor_split(10, 1), result.tensor_split(10), strict=True)
        for part, aggregated in parts:
            share = tau * (len(aggregated) / DIMENSIONS) ** 0.5
            torch.testing.assert_close(
                aggregated, centered_clip(part, torch.ones(len(part)), share), rtol=1e-3, atol=1e-4
            )
        last = result


def test_a_step_is_never_of_those_who_are_removed_in_it() -> None:
    """It is repeated without them: as if they had not been there."""
    peers = swarm(OpenShift)
    result = peers.step()
    others = Swarm({name: Peer for name in NAMES if name not in ATTACKERS}, noisy_gradients(), DIMENSIONS).step()
    assert peers.removed.keys() == ATTACKERS
    torch.testing.assert_close(result, others, rtol=1e-4, atol=1e-4)


def test_attacks_cost_little_until_they_are_noticed() -> None:
    gradient_of = noisy_gradients()
    peers = swarm(LargeSignFlip)
    mean = torch.stack([gradient_of(name, 0) for name in NAMES]).mean(0)
    distance = (peers.step() - mean).norm()
    assert distance < 1.5 * mean.norm()
    flipped = [gradient_of(name, 0) * (-1000 if name in ATTACKERS else 1) for name in NAMES]
    assert (torch.stack(flipped).mean(0) - mean).norm() > 100 * distance


def test_who_withholds_its_share_cannot_choose_among_seeds() -> None:
    """The seed that counts is none of those it could have computed: all shares are new in the next attempt."""
    peers = swarm(NoReveal)
    peers.step()
    last = peers.machines["p0"].snapshot().last
    assert last is not None and last.round.attempt == 1 and peers.removed.keys() == ATTACKERS
    assert last.round.seed not in {b"", bytes(32)}
    shares = {peers.machines[name]._seed_share for name in peers.honest}
    assert len(shares) == 7


def test_newcomers_weigh_nothing_until_they_are_audited() -> None:
    peers = swarm(rules=Rules(audits_to_join=2))
    peers.step()
    peers.step({"new": Peer})
    waited = 0
    while "new" in peers.machines["p0"].roster.newcomers:
        last = peers.machines["p0"].snapshot().last
        assert last is not None and "new" not in last.round.workers + last.round.owners
        assert_of_one_mind(peers)
        peers.step()
        waited += 1
        assert waited < 60
    assert waited >= 3, "two audits, each of which takes place after the step that it is of"
    peers.step()
    last = peers.machines["new"].snapshot().last
    assert last is not None and "new" in last.round.owners
    assert_of_one_mind(peers)
    assert peers.removed == {}


def test_newcomers_who_cheat_are_found_before_they_count() -> None:
    peers = swarm()
    peers.step()
    peers.step({"new": SignFlip})
    while "new" not in peers.removed:
        assert peers.step_number < 60
        last = peers.machines["p0"].snapshot().last
        assert last is not None and "new" not in last.round.workers
        peers.step()
    assert peers.removed["new"].is_banned
    peers.step({"new": SignFlip})
    assert "new" not in peers.machines["p0"].roster.all, "a ban is for ever"


def test_who_fell_silent_may_come_back_as_a_newcomer() -> None:
    peers = swarm(NoReveal)
    peers.step()
    peers.step({"p1": Peer})
    assert peers.machines["p0"].roster.newcomers == ("p1",)
    assert_of_one_mind(peers)


class SeldomLate(Peer):
    def sends(self, delivery: Delivery, to: str) -> Delivery | None:
        message = delivery.message
        is_late = isinstance(message, Commitment) and message.step in (2, 3, 9)
        return None if is_late else delivery


def test_a_peer_that_misses_a_step_goes_on_with_the_next() -> None:
    peers = Swarm({**dict.fromkeys(NAMES, Peer), "p5": SeldomLate}, noisy_gradients(seed=5), DIMENSIONS, seed=5)
    for step in range(12):
        peers.step()
        assert torch.equal(peers.benches["p5"].result, peers.benches["p0"].result)
        last = peers.machines["p0"].snapshot().last
        assert last is not None and ("p5" in last.round.owners) == (step not in (2, 3, 9))
    assert peers.removed == {}


def test_a_minority_of_colluding_jurors_cannot_ban_an_honest_peer() -> None:
    for seed in range(3):
        peers = swarm(Collusion, seed=seed)
        while not peers.removed.keys() >= ATTACKERS and peers.step_number < 30:
            peers.step()
        assert peers.removed.keys() == ATTACKERS


@pytest.mark.parametrize("module", PURE)
def test_the_machine_is_pure(module: str) -> None:
    allowed = {*POLICY_IMPORTS, "abc", "hashlib", "swarm_training"}
    path = f"swarm_training/robust/{module}.py"
    source = (ROOT / path).read_text()
    assert impurities(path, source, allowed) == []
    assert not {"centered_clip", "workbench"} & set(source.replace(".", " ").split())


@SLOW
def test_the_benchmark_shows_that_it_works(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/btard.py", "--quick", "--only", "shift, open", "--json", str(file)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "30 steps without attackers: 0 of 10 removed" in output
    assert '"name": "shift, open"' in file.read_text()
