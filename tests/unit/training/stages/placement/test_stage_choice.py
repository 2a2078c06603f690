"""Which stage a peer takes and when it moves: what must hold of every view, and runs that come to rest."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from swarm_training.stages.placement.stage_choice import (
    PlacedPeer,
    PlacementView,
    StageMove,
    choose_stage,
    may_go,
    own_move,
    plan_moves,
    stage_speeds,
)

SEEDS = range(40)


def view_of(*speeds: list[float]) -> PlacementView:
    """Peers of these speeds at each stage, named by stage and number."""
    peers = [
        PlacedPeer(f"{stage}-{number}", stage, speed)
        for stage, each in enumerate(speeds)
        for number, speed in enumerate(each)
    ]
    return PlacementView((1.0,) * len(speeds), tuple(peers))


def random_view(seed: int) -> PlacementView:
    chance = random.Random(seed)
    num_stages = chance.randint(1, 6)
    costs = tuple(chance.choice([1.0, 1.0, chance.uniform(0.5, 2.0)]) for _ in range(num_stages))
    equal = chance.random() < 0.3
    peers = tuple(
        PlacedPeer(
            f"{chance.getrandbits(64):016x}",
            chance.randrange(num_stages),
            1.0 if equal else chance.lognormvariate(0, 0.7),
            is_working=chance.random() < 0.9,
            may_move=chance.random() < 0.8,
        )
        for _ in range(chance.randint(0, 40))
    )
    return PlacementView(costs, peers)


def moved(view: PlacementView, *moves: StageMove) -> PlacementView:
    to = {move.peer_id: move.to for move in moves}
    return replace(view, peers=tuple(replace(peer, stage=to.get(peer.peer_id, peer.stage)) for peer in view.peers))


def speeds_of_all(view: PlacementView) -> list[float]:
    """Of those on their way too."""
    return stage_speeds(replace(view, peers=tuple(replace(peer, is_working=True) for peer in view.peers)))


def test_who_joins_takes_the_slowest_stage_and_of_equals_the_first() -> None:
    assert choose_stage(view_of([1, 1], [0.5], [1.5]), "new") == 1
    assert choose_stage(view_of([1, 1], [1], [1]), "new") == 1
    assert choose_stage(view_of([], [], []), "new") == 0
    unequal = PlacementView((1.0, 3.0), view_of([1.0], [2.0]).peers)
    assert choose_stage(unequal, "new") == 1


def test_a_joiner_does_not_count_itself_and_counts_who_leaves_where_it_goes() -> None:
    peers = (PlacedPeer("a", 0, 1.0), PlacedPeer("b", 1, 1.0, next_stage=0), PlacedPeer("c", 1, 9.0, is_working=False))
    assert choose_stage(PlacementView((1.0,) * 2, tuple(peers)), "c") == 1


@pytest.mark.parametrize("num_joiners", [1, 2, 7, 30])
def test_who_joins_at_once_is_spread_after_choosing_again(num_joiners: int) -> None:
    present = view_of([1, 1], [1], [], [1, 1, 1])
    ids = [f"new-{number:02}" for number in range(num_joiners)]
    choices = {peer_id: choose_stage(present, peer_id) for peer_id in ids}
    for _ in range(num_joiners):
        joining = tuple(PlacedPeer(peer_id, choices[peer_id], 1.0, is_working=False) for peer_id in ids)
        view = replace(present, peers=present.peers + joining)
        chosen = {peer_id: choose_stage(view, peer_id) for peer_id in ids}
        if chosen == choices:
            break
        choices = chosen
    assert choices == chosen
    one_by_one = present
    for peer_id in ids:
        stage = choose_stage(one_by_one, peer_id)
        one_by_one = replace(one_by_one, peers=(*one_by_one.peers, PlacedPeer(peer_id, stage, 1.0)))
    assert choices == {peer.peer_id: peer.stage for peer in one_by_one.peers if peer.peer_id in choices}


def test_a_peer_goes_from_the_fastest_stage_to_the_slowest() -> None:
    assert plan_moves(view_of([1] * 5, [1], [1] * 3)) == (StageMove("0-0", 0, 1), StageMove("0-1", 0, 1))
    # 0.9 leaves 2.0 and gives 1.9; each of the others makes one of the two slower.
    assert plan_moves(view_of([1.4, 0.9, 0.6], [1.0])) == (StageMove("0-1", 0, 1),)


def test_ties_are_broken_by_peer_id_whatever_the_order_of_the_view() -> None:
    view = view_of([1] * 4, [1], [1] * 4)  # of the fastest stages the first gives, then the other one
    shuffled = list(view.peers)
    for seed in range(10):
        random.Random(seed).shuffle(shuffled)
        expected = StageMove("0-0", 0, 1), StageMove("2-0", 2, 1)
        assert plan_moves(replace(view, peers=tuple(shuffled))) == expected


def test_a_stage_without_peers_is_filled_and_none_is_emptied() -> None:
    assert plan_moves(view_of([1, 1], [])) == (StageMove("0-0", 0, 1),)
    assert plan_moves(view_of([1], [1], [])) == ()
    assert len(plan_moves(view_of([1] * 40, [], [], []))) == 30


@pytest.mark.parametrize("seed", SEEDS)
def test_each_move_of_a_plan_raises_what_is_lowest(seed: int) -> None:
    view = random_view(seed)
    moves = plan_moves(view)
    assert len({move.peer_id for move in moves}) == len(moves)
    states = [view]
    for move in moves:
        (peer,) = [peer for peer in view.peers if peer.peer_id == move.peer_id]
        assert peer.stage == move.since != move.to and peer.may_move and peer.is_working
        states.append(moved(states[-1], move))
    for (before, after), move in zip(pairwise(map(speeds_of_all, states)), moves, strict=True):
        assert min(after) >= min(before) * (1 - 1e-9)
        assert min(after[move.since], after[move.to]) > before[move.to] == pytest.approx(min(before))
    assert plan_moves(states[-1]) == ()


@pytest.mark.parametrize("seed", range(20))
def test_where_no_move_is_planned_none_would_raise_the_slowest_stage(seed: int) -> None:
    """Tries all of them."""
    view = random_view(seed)
    settled = moved(view, *plan_moves(view))
    speeds = speeds_of_all(settled)
    slowest = min(speeds)
    for peer, to in product(settled.peers, range(len(settled.costs))):
        if peer.may_move and peer.is_working and speeds[to] == slowest and to != peer.stage:
            after = speeds_of_all(moved(settled, StageMove(peer.peer_id, peer.stage, to)))
            assert min(after[peer.stage], after[to]) <= slowest * 1.0101


def test_what_gains_less_than_the_margin_is_left() -> None:
    view = view_of([1.0, 0.05], [1.0])
    assert plan_moves(view, margin=0.06) == ()
    assert plan_moves(view, margin=0.04) == ()  # the first stage would have no more than the second has
    view = view_of([1.1, 0.05], [1.0])
    assert plan_moves(view, margin=0.06) == ()
    assert plan_moves(view, margin=0.04) == (StageMove("0-1", 0, 1),)


def test_who_may_not_move_or_is_on_the_way_stays_and_counts_where_it_goes() -> None:
    view = view_of([1, 1, 1], [1])
    pinned = replace(view, peers=tuple(replace(peer, may_move=False) for peer in view.peers))
    assert plan_moves(pinned) == ()
    first, second, *others = view_of([1] * 4, [1]).peers
    leaving = PlacementView((1.0,) * 2, (replace(first, next_stage=1), second, *others))
    assert plan_moves(leaving) == ()
    loading = PlacementView((1.0,) * 2, (replace(first, stage=1, is_working=False), second, *others))
    assert plan_moves(loading) == ()


def test_of_those_that_announced_as_many_go_as_still_help() -> None:
    staying = view_of([1] * 6, [1, 1]).peers
    announced = [replace(peer, next_stage=1) if peer.stage == 0 else peer for peer in staying]
    view = PlacementView((1.0,) * 2, tuple(announced))
    assert [peer.peer_id for peer in announced if may_go(view, peer.peer_id)] == ["0-0", "0-1"]
    assert own_move(PlacementView((1.0,) * 2, tuple(staying)), "0-1") == 1
    assert own_move(PlacementView((1.0,) * 2, tuple(staying)), "0-2") is None
    assert not may_go(view, "1-0")


def test_nobody_leaves_a_stage_slower_than_the_slowest_while_others_are_on_their_way() -> None:
    """The plan may send a peer on whose place another must take first."""
    arriving = PlacedPeer("fast", 1, 3.0, is_working=False)
    here = PlacedPeer("slow", 1, 0.9, next_stage=2)
    view = PlacementView((1.0,) * 3, (*view_of([1, 1]).peers, here, arriving, PlacedPeer("last", 2, 0.8)))
    assert not may_go(view, "slow")
    there = replace(view, peers=(*view.peers[:3], replace(arriving, is_working=True), view.peers[-1]))
    assert may_go(there, "slow")


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_goes_at_once_nothing_becomes_slower_now_or_later(seed: int) -> None:
    """All that announce in the same view and go after it: the minimum of those who work does not fall."""
    view = random_view(seed)
    targets = {peer.peer_id: own_move(view, peer.peer_id) for peer in view.peers}
    announced = replace(view, peers=tuple(replace(peer, next_stage=targets[peer.peer_id]) for peer in view.peers))
    going = {peer.peer_id for peer in announced.peers if may_go(announced, peer.peer_id)}
    away = tuple(
        replace(peer, stage=peer.next_stage, is_working=False) if peer.peer_id in going else peer
        for peer in announced.peers
    )
    assert min(stage_speeds(replace(view, peers=away))) >= min(stage_speeds(view)) * (1 - 1e-9)
    assert min(speeds_of_all(replace(view, peers=away))) >= min(speeds_of_all(view)) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_a_run_comes_to_rest_and_nobody_moves_back(seed: int) -> None:
    """Peers ask in random order, with views that are some announcements old."""
    chance = random.Random(seed)
    view = view_of([chance.uniform(0.5, 2) for _ in range(40)], *([] for _ in range(chance.randint(1, 7))))
    views, been, last_change = [view], {peer.peer_id: [0] for peer in view.peers}, 0
    for turn in range(4000):
        current = views[-1]
        peer = chance.choice(current.peers)
        seen = views[max(0, len(views) - 1 - chance.randrange(4))]
        if not peer.is_working:
            changed = replace(peer, is_working=True)
        elif peer.next_stage is None:
            changed = replace(peer, next_stage=own_move(seen, peer.peer_id))
        elif may_go(current, peer.peer_id):
            changed = replace(peer, stage=peer.next_stage, next_stage=None, is_working=False)
            been[peer.peer_id].append(changed.stage)
        else:
            changed = replace(peer, next_stage=None)
        if changed != peer:
            views.append(replace(current, peers=tuple(changed if each is peer else each for each in current.peers)))
            last_change = turn
    assert last_change < 2500
    assert plan_moves(views[-1]) == ()
    assert all(len(set(stages)) == len(stages) for stages in been.values())
    mean = sum(peer.speed for peer in view.peers) / len(view.costs)
    assert min(stage_speeds(views[-1])) > 0.7 * mean
