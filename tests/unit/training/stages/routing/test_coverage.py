"""What a step lacks, beside sets that are counted one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass

from swarm_training.core.moment import Moment
from swarm_training.stages.routing.coverage import Claims, lacking, members
from swarm_training.stages.routing.run_stages import moment_of

NOW, LATER = Moment(0, 7), Moment(0, 8)


@dataclass(frozen=True)
class Peer:
    peer_id: str
    has: frozenset[int] = frozenset()
    moment: Moment = NOW
    holds: bool = False

    @property
    def micro_batches(self) -> bytes:
        return sum(1 << number for number in self.has).to_bytes(64, "little")


def peer(name: str, *has: int, moment: Moment = NOW, holds: bool = False) -> Peer:
    return Peer(name, frozenset(has), moment, holds)


def test_bitmaps_are_read_from_the_lowest_bit_of_the_first_byte() -> None:
    assert members(bytes([0b101, 0, 0b10000000])) == {0, 2, 23}
    rng = random.Random(0)
    for _ in range(50):
        has = frozenset(rng.sample(range(512), rng.randrange(60)))
        assert members(Peer("a", has).micro_batches) == has


def test_a_stage_lacks_what_none_of_its_peers_at_this_moment_has() -> None:
    rng = random.Random(1)
    for _ in range(50):
        stages = [
            [
                Peer(f"{k}{p}", frozenset(rng.sample(range(8), rng.randrange(5))), rng.choice([NOW, Moment(0, 6)]))
                for p in range(rng.randrange(4))
            ]
            for k in range(3)
        ]
        claimed = {k: {rng.randrange(8)} for k in range(3)}
        found = lacking(stages, NOW, 8, claimed)
        for number in range(8):
            expected = {
                k
                for k, peers in enumerate(stages)
                if number not in claimed[k] and not any(number in each.has and each.moment == NOW for each in peers)
            }
            assert found.get(number, frozenset()) == expected


def test_a_stage_that_has_its_average_lacks_nothing() -> None:
    later, back = peer("a", moment=LATER), peer("b", moment=Moment(1, 0))
    behind = peer("d", moment=Moment(0, 3))
    for done in ([peer("a", holds=True), peer("b")], [later], [back], [later, back, peer("c")], [later, behind]):
        assert lacking([done, [peer("c")]], NOW, 2, {}) == {0: {1}, 1: {1}}
    assert lacking([[peer("a", holds=True, moment=Moment(0, 6)), peer("b", 0)]], NOW, 2, {}) == {1: {0}}


def test_a_peer_that_claims_to_have_gone_on_does_not_hide_what_its_mates_lack() -> None:
    ahead = peer("a", moment=LATER)
    assert lacking([[ahead, peer("c", 0)]], NOW, 2, {}) == {1: {0}}
    assert lacking([[ahead, peer("c"), peer("d")]], NOW, 2, {}) == {0: {0}, 1: {0}}


def test_trainers_are_wanted_where_the_slowest_stage_is() -> None:
    stages = [[peer("a", moment=LATER), peer("b")], [peer("c"), peer("d", moment=Moment(0, 3))]]
    assert moment_of(stages) == NOW
    assert moment_of([stages[0], []]) is None and moment_of([]) is None
    back = peer("a", moment=Moment(1, 2))
    assert moment_of([[back], [peer("c")]]) == NOW and moment_of([[back], [back]]) == Moment(1, 2)


def test_what_was_committed_counts_until_a_bitmap_should_show_it() -> None:
    stages = [[peer("a"), peer("b")], [peer("c")]]
    claims = Claims(settle_s=5.0)
    claims.add(0, 3, "a", 0.0)
    claims.add(1, 3, "c", 0.0)
    claims.add(1, 4, "c", 4.0)
    claims.settle(stages, NOW, 4.9)
    assert claims.of(0) == {3} and claims.of(1) == {3, 4}
    claims.settle(stages, NOW, 5.0)
    assert not claims.of(0) and claims.of(1) == {4}


def test_a_bitmap_that_has_shown_it_is_believed_from_then_on() -> None:
    claims = Claims(settle_s=5.0)
    claims.add(0, 3, "a", 0.0)
    claims.settle([[peer("a", 3)]], NOW, 1.0)
    assert claims.of(0) == frozenset()
    assert lacking([[peer("a")]], NOW, 4, {0: claims.of(0)})[3] == {0}  # it has discarded its sums since


def test_commits_go_with_their_peer() -> None:
    for stages in ([[peer("b")]], [[peer("a", moment=LATER)]]):
        claims = Claims(settle_s=5.0)
        claims.add(0, 3, "a", 0.0)
        claims.settle(stages, NOW, 0.1)
        assert claims.of(0) == frozenset()
