"""KV-cache room: never promised twice, never lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from swarm_protocol.errors import PeerBusy
from swarm_server.kv_cache import CacheBudget, Lease, default_cache_tokens

CAPACITY, BLOCKS = 100, 4


def test_a_lease_takes_room_and_gives_it_back() -> None:
    budget = CacheBudget(CAPACITY, BLOCKS)
    assert budget.tokens_left == CAPACITY
    lease = budget.lease(BLOCKS, 30)
    assert (lease.num_tokens, budget.tokens_left) == (30, 70)
    lease.grow_to(50)
    assert (lease.num_tokens, budget.tokens_left) == (50, 50)
    lease.grow_to(40)  # has room enough
    assert (lease.num_tokens, budget.tokens_left) == (50, 50)
    lease.resize(10)
    assert (lease.num_tokens, budget.tokens_left) == (10, 90)
    lease.release()
    lease.release()  # harmless
    assert budget.tokens_left == CAPACITY


def test_a_session_over_fewer_blocks_takes_less() -> None:
    budget = CacheBudget(CAPACITY, BLOCKS)
    lease = budget.lease(1, 40)
    assert budget.tokens_left == 90  # a session over all blocks could still get so many
    budget.lease(3, 40)
    assert budget.tokens_left == 60
    lease.grow_to(CAPACITY + 60)  # room of other blocks serves it as well: memory is one
    assert budget.tokens_left == 30


def test_all_the_room_can_be_leased_and_no_more() -> None:
    budget = CacheBudget(CAPACITY, BLOCKS)
    budget.lease(BLOCKS, CAPACITY)
    assert budget.tokens_left == 0
    budget.lease(BLOCKS)  # an empty lease needs no room
    with pytest.raises(PeerBusy, match="no room for 1 more tokens in the KV cache: 0 of 100 are left"):
        budget.lease(BLOCKS, 1)


def test_a_refusal_names_the_room_left_and_changes_nothing() -> None:
    budget = CacheBudget(CAPACITY, BLOCKS)
    lease = budget.lease(BLOCKS, 60)
    with pytest.raises(PeerBusy, match="no room for 41 more tokens in the KV cache: 40 of 100 are left"):
        budget.lease(BLOCKS, 41)
    with pytest.raises(PeerBusy, match="no room for 41 more tokens"):
        lease.grow_to(101)
    assert (lease.num_tokens, budget.tokens_left) == (60, 40)
    with pytest.raises(PeerBusy, match="no room for 161 more tokens in the KV cache: 160 of 400 are left"):
        budget.lease(1, 161)
    assert budget.tokens_left == 40


@pytest.mark.parametrize(
    ("token_bytes", "free_bytes", "expected"),
    [(1000, 50_000_000, 10_000), (1000, 0, 1024), (1000, 10**12, 65536), (0, 0, 1024)],
)
def test_default_room_is_a_fifth_of_free_memory_within_limits(token_bytes: int, free_bytes: int, expected: int) -> None:
    assert default_cache_tokens(token_bytes, free_bytes) == expected


class Budget(RuleBasedStateMachine):
    """Sessions come, grow, shrink and go; a ledger of what they hold says what must be left."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.budget = CacheBudget(CAPACITY, BLOCKS)
        self.ledger: dict[Lease, tuple[int, int]] = {}

    def left(self) -> int:
        return CAPACITY * BLOCKS - sum(num_blocks * num_tokens for num_blocks, num_tokens in self.ledger.values())

    @rule(target=leases, num_blocks=st.integers(1, BLOCKS), num_tokens=st.integers(0, CAPACITY + 20))
    def open(self, num_blocks: int, num_tokens: int) -> Lease:
        fits = num_blocks * num_tokens <= self.left()
        if not fits:
            with pytest.raises(PeerBusy):
                self.budget.lease(num_blocks, num_tokens)
            num_tokens = 0
        lease = self.budget.lease(num_blocks, num_tokens)
        self.ledger[lease] = num_blocks, num_tokens
        return lease

    @rule(lease=leases, num_tokens=st.integers(0, CAPACITY + 20), shrink=st.booleans())
    def resize(self, lease: Lease, num_tokens: int, shrink: bool) -> None:
        num_blocks, held = self.ledger[lease]
        change = lease.resize if shrink else lease.grow_to
        if num_tokens < held and not shrink:
            num_tokens = held
        if num_blocks * (num_tokens - held) > self.left():
            with pytest.raises(PeerBusy):
                change(num_tokens)
        else:
            change(num_tokens)
            self.ledger[lease] = num_blocks, num_tokens

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        lease.release()
        del self.ledger[lease]

    @invariant()
    def room_is_what_nobody_holds(self) -> None:
        assert self.budget.tokens_left == self.left() // BLOCKS >= 0
        assert all(lease.num_tokens == num_tokens for lease, (_, num_tokens) in self.ledger.items())

    def teardown(self) -> None:
        for lease in self.ledger:
            lease.release()
        assert self.budget.tokens_left == CAPACITY


TestBudget = Budget.TestCase
