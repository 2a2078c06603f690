"""Standings, and who audits whom."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from swarm_training.robust.roster import MemberRoster, Rules, part_sizes, part_tau, projection_limit

NAMES = [f"peer{number}" for number in range(10)]


def test_newcomers_count_after_their_audits() -> None:
    roster = MemberRoster(NAMES[:2], Rules(audits_to_join=2))
    roster.add(["new", NAMES[0]])
    assert roster.full == ("peer0", "peer1") and roster.newcomers == ("new",)
    roster.passed_audit("new")
    assert roster.newcomers == ("new",)
    roster.passed_audit("new")
    assert roster.full == ("new", "peer0", "peer1") and roster.newcomers == ()
    roster.remove("new")
    roster.passed_audit("new")
    assert roster.all == ("peer0", "peer1")


def test_absences_count_in_a_row() -> None:
    roster = MemberRoster(NAMES, Rules(max_absences=2))
    missed = [roster.missed("peer0") for _ in range(2)]
    roster.attended("peer0")
    assert missed + [roster.missed("peer0") for _ in range(3)] == [False, False, False, False, True]


def test_complaints_count_for_ever() -> None:
    roster = MemberRoster(NAMES, Rules(max_unfounded=2))
    assert [roster.complained("peer0") for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("share", "number"), [(0.1, 1), (0.2, 2), (0.9, 5)])
def test_audits_are_of_others_and_evenly_spread(share: float, number: int) -> None:
    roster = MemberRoster(NAMES, Rules(audit_share=share))
    validators, targets = Counter[str](), Counter[str]()
    for step in range(2000):
        audits = roster.audits(step.to_bytes(32, "little"), NAMES)
        assert len(audits) == number and not audits.keys() & set(audits.values())
        validators.update(audits.keys())
        targets.update(audits.values())
    for count in (validators, targets):
        assert all(abs(count[name] - 200 * number) < 100 * number**0.5 for name in NAMES)


def test_only_who_contributed_is_audited_newcomers_too() -> None:
    roster = MemberRoster(NAMES, Rules())
    roster.add(["new"])
    targets = {name for step in range(50) for name in roster.audits(bytes([step]), ["new", "peer3", "gone"]).values()}
    assert targets == {"new", "peer3"}
    assert all("new" not in roster.audits(bytes([step]), ["new"]) for step in range(50))


def test_seeds_decide() -> None:
    roster = MemberRoster(NAMES, Rules())
    assert roster.audits(b"a", NAMES) == roster.audits(b"a", NAMES) != roster.audits(b"b", NAMES)


def test_nobody_audits_alone() -> None:
    assert MemberRoster(["only"], Rules()).audits(b"", ["only"]) == {}


@pytest.mark.parametrize(("n", "parts"), [(10, 3), (9, 3), (100, 7)])
def test_sizes_are_those_of_torch(n: int, parts: int) -> None:
    assert part_sizes(n, parts) == [len(part) for part in torch.zeros(n).tensor_split(parts)]


def test_squares_of_taus_add_up() -> None:
    taus = [part_tau(3.0, size, 100) for size in part_sizes(100, 7)]
    assert sum(tau**2 for tau in taus) == pytest.approx(9)
    assert projection_limit(Rules(projection_tolerance=0.01), 3.0, 25, 100) == pytest.approx(0.01 * 1.5 / 5)
