"""What follows from the progress of peers: quorums intersect, and nobody is taken for what it is not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarm_training.core.moment import Moment
from swarm_training.core.record import JOINING, MEETING, Progress
from swarm_training.progress.policy import (
    LocalView,
    excluded_by_most,
    expected_at,
    has_quorum,
    is_batch_complete,
    is_behind,
    is_in_minority,
    known_at,
    leader_of,
    samples_at,
    seconds_to_step,
    sources_of_state,
)


def peer(name: str, **changes: object) -> Progress:
    return replace(Progress("toy", name, address=f"{name}:1", target_batch_size=100), **changes)


NAMES = st.sets(st.sampled_from("abcdefg"))


@given(NAMES, NAMES, NAMES, NAMES)
def test_two_quorums_of_one_roster_have_a_peer_in_common(roster: set, one: set, other: set, gone: set) -> None:
    if roster - gone and has_quorum(one - gone, roster, gone) and has_quorum(other - gone, roster, gone):
        assert one & other & roster


def test_half_is_enough_with_the_first() -> None:
    assert has_quorum("ab", "abcd", "") and not has_quorum("cd", "abcd", "")
    assert has_quorum("cd", "abcd", "a") and has_quorum("d", "abcd", "abc")
    assert not has_quorum("b", "ab", "") and has_quorum("b", "ab", "a")


def test_a_batch_is_complete_with_the_samples_of_all_at_the_step() -> None:
    view = LocalView(peer("a", samples=40), (peer("b", samples=59), peer("c", step=1, samples=90)))
    assert samples_at(view, Moment(0, 0)) == 99 and not is_batch_complete(view)
    assert is_batch_complete(replace(view, own=peer("a", samples=41)))
    assert is_batch_complete(LocalView(peer("a"), (peer("b", state=MEETING),)))
    assert not is_batch_complete(LocalView(peer("a"), (peer("b", state=JOINING, samples=200),)))


def test_no_peer_completes_a_batch_by_what_it_claims_alone() -> None:
    view = LocalView(peer("a", samples=30), (peer("b", samples=1 << 24, samples_per_s=1.0),), max_samples=60)
    assert samples_at(view, Moment(0, 0)) == 90 and not is_batch_complete(view) and seconds_to_step(view) == 10.0
    assert is_batch_complete(replace(view, own=peer("a", samples=40)))


def test_the_expected_time_of_the_next_step() -> None:
    view = LocalView(peer("a", samples=40, samples_per_s=4.0), (peer("b", samples=20, samples_per_s=1.0),))
    assert seconds_to_step(view) == 8.0
    assert seconds_to_step(LocalView(peer("a"))) is None
    assert seconds_to_step(LocalView(peer("a", samples=100))) == 0.0


def test_who_lags_behind_is_expected_if_it_took_part_in_the_last_step() -> None:
    view = LocalView(peer("a", step=2), (peer("b", step=1), peer("c", step=1), peer("d", step=3)), (peer("e", step=2),))
    assert expected_at(view, Moment(0, 2), ["a", "b"]) == {"a", "b"}
    assert known_at(view, Moment(0, 2)) == {"a", "e"}


def test_the_leader_is_the_same_for_all_and_changes_from_step_to_step() -> None:
    peers = [peer(name) for name in "abcdef"]
    leaders = set()
    for step in range(20):
        now = [replace(each, step=step) for each in peers]
        found = {leader_of(LocalView(own, tuple(other for other in now if other is not own))).peer_id for own in now}
        assert len(found) == 1
        leaders |= found
    assert len(leaders) > 3


def test_who_cannot_be_called_does_not_lead() -> None:
    hidden, other = peer("a", address=""), peer("b")
    assert leader_of(LocalView(hidden, (other,))) is other
    assert leader_of(LocalView(hidden)) is None
    assert leader_of(LocalView(hidden, (other,)), ["b"]) is None


def test_a_peer_is_behind_a_quorum_or_half_of_the_others() -> None:
    later = peer("z", step=1)
    assert is_behind(LocalView(peer("a"), (later,)), ["a", "b", "z"])
    others = (peer("b"), peer("c"), peer("d"), later)
    assert not is_behind(LocalView(peer("a"), others), ["a", "b", "z"])
    assert is_behind(LocalView(peer("a"), others), ["z"])
    assert not is_behind(LocalView(peer("a", step=1), others), ["z"])


def test_state_comes_from_the_majority_and_never_from_one_who_claims_to_be_far_ahead() -> None:
    good = [peer(name, step=5, state_digest=b"good") for name in "bcd"]
    liar = peer("e", step=10**9, state_digest=b"evil")
    odd = peer("f", step=5, state_digest=b"odd")
    joiner = LocalView(peer("a", state=JOINING), (*good, liar, odd))
    assert sources_of_state(joiner) == tuple(good)
    assert sources_of_state(LocalView(peer("a", step=6, state_digest=b"own"), tuple(good))) == ()
    assert sources_of_state(LocalView(peer("a", step=5, state_digest=b"good"), (good[0], odd))) == (odd,)


def test_a_minority_knows_that_it_is_one() -> None:
    def view(own: bytes, *others: bytes) -> LocalView:
        peers = (peer(name, state_digest=digest) for name, digest in zip("bcd", others, strict=False))
        return LocalView(peer("a", state_digest=own), tuple(peers))

    assert is_in_minority(view(b"1", b"2", b"2"))
    assert not is_in_minority(view(b"1", b"1", b"2"))
    assert not is_in_minority(view(b"1", b"2")) and not is_in_minority(view(b"", b"2", b"2"))


def test_who_has_gone_back_is_ahead_of_who_has_not_whatever_their_steps() -> None:
    here, back = (
        peer("a", step=130, state_digest=b"own"),
        [peer(name, step=100, rollbacks=1, state_digest=b"good") for name in "bc"],
    )
    view = LocalView(here, tuple(back))
    assert is_behind(view, "abc") and sources_of_state(view) == tuple(back)
    assert not is_batch_complete(replace(view, others=tuple(replace(each, state=MEETING) for each in back)))
    ahead = LocalView(back[0], (here, back[1]))
    assert not is_behind(ahead, "abc") and sources_of_state(ahead) == ()
    assert expected_at(ahead, Moment(1, 100), "abc") == {"a", "b", "c"}
    assert known_at(ahead, Moment(1, 100)) == {"b", "c"}
    assert not is_in_minority(LocalView(peer("a", step=100, state_digest=b"own"), tuple(back)))


def test_whom_most_of_the_others_exclude() -> None:
    def voting(**said: str) -> frozenset[str]:
        return excluded_by_most([peer(name, excludes=tuple(excluded)) for name, excluded in said.items()])

    assert voting(a="", b="a", c="a") == {"a"}
    assert voting(a="bc", b="a", c="a") == {"a"}  # who is excluded cannot exclude the others
    assert voting(a="", b="a", c="") == frozenset()
    assert voting(a="b", b="a") == frozenset()  # of two nobody knows
    assert voting(a="", b="a", c="a", d="", e="") == frozenset()
    assert voting(a="", b="a", c="a", d="a", e="") == {"a"}
    assert voting(b="a", c="a") == {"a"}  # it is not there at present
    assert voting(a="aa", b="aa") == frozenset()
