"""Who keeps replicas, and when an expert is nobody's any more."""

from __future__ import annotations

from collections import Counter

from swarm_training.experts.search.keeping import Orphans, in_rank

PEERS = [f"peer{number}" for number in range(10)]
CELLS = [(x, y) for x in range(20) for y in range(20)]


def test_ranks_are_the_same_for_everybody_and_share_the_work() -> None:
    assert all(in_rank("demo", cell, PEERS) == in_rank("demo", cell, reversed(PEERS)) for cell in CELLS)
    firsts = Counter(in_rank("demo", cell, PEERS)[0] for cell in CELLS)
    assert firsts.keys() == set(PEERS)
    assert max(firsts.values()) < 2.5 * len(CELLS) / len(PEERS)  # 40 each, with a deviation of 6


def test_who_leaves_changes_nothing_for_the_others() -> None:
    for cell in CELLS:
        ranked = in_rank("demo", cell, PEERS)
        assert in_rank("demo", cell, PEERS[1:]) == [peer for peer in ranked if peer != PEERS[0]]


def test_an_expert_is_due_once_it_has_been_missing_without_a_break() -> None:
    orphans, after = Orphans(), {(1,): 10.0, (2,): 20.0, (3,): 10.0}
    assert orphans.due(0.0, {(1,): False, (2,): False, (3,): True}, after) == []
    assert orphans.due(5.0, {(1,): True, (2,): False, (3,): False}, after) == []  # it was seen again
    assert orphans.due(14.0, {(1,): False, (2,): False, (3,): False}, after) == []
    assert orphans.due(20.0, {(1,): False, (2,): False, (3,): False}, after) == [(2,), (3,)]
    assert orphans.due(24.0, {(1,): False}, after) == [(1,)]
