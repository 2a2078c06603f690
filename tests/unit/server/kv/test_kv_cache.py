"""KV-cache room: never promised twice, never lost."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from swarm_protocol.errors import PeerBusy
from swarm_server.kv.kv_cache import CacheBudget, Lease, default_cache_bytes

TOKEN = 10  # bytes
CAPACITY = 100 * TOKEN


class Memory:
    """Whatever holds bytes: a page of keys and values."""

    def __init__(self, lease: Lease, size_bytes: int) -> None:
        self.charge = lease.take(size_bytes, self)


@dataclass
class Piece:
    """What the ledger knows of some memory."""

    lease: Lease
    memory: Memory
    size: int


@pytest.fixture
def budget() -> CacheBudget:
    return CacheBudget(CAPACITY, TOKEN)


class TestPromises:
    def test_take_room_and_give_it_back(self, budget: CacheBudget) -> None:
        assert (budget.tokens_left, budget.capacity_tokens) == (100, 100)
        lease = budget.lease("anna", 30 * TOKEN)
        assert (lease.charged, budget.tokens_left) == (30 * TOKEN, 70)
        lease.promise(50 * TOKEN)
        assert budget.tokens_left == 50
        lease.promise(40 * TOKEN)  # has room enough
        assert (lease.charged, budget.tokens_left) == (50 * TOKEN, 50)
        lease.close()
        lease.close()  # harmless
        assert budget.tokens_left == 100

    def test_all_the_room_can_be_promised_and_no_more(self, budget: CacheBudget) -> None:
        budget.lease("anna", CAPACITY)
        assert budget.tokens_left == 0
        budget.lease("anna")  # an empty lease needs no room
        with pytest.raises(PeerBusy, match="no room for 1 more tokens in the KV cache: 0 of 100 are left"):
            budget.lease("anna", 1)

    def test_a_refusal_names_the_room_left_and_changes_nothing(self, budget: CacheBudget) -> None:
        lease = budget.lease("anna", 60 * TOKEN)
        with pytest.raises(PeerBusy, match=r"no room for 41 more tokens in the KV cache: 40 of 100 are left$"):
            budget.lease("anna", 41 * TOKEN)
        with pytest.raises(PeerBusy, match="no room for 41 more tokens"):
            lease.promise(101 * TOKEN)
        with pytest.raises(PeerBusy, match="no room for 41 more tokens"):
            lease.take(101 * TOKEN, lease)
        assert (lease.charged, budget.tokens_left) == (60 * TOKEN, 40)


class TestReclaiming:
    @pytest.fixture
    def kept(self, budget: CacheBudget) -> list[Memory]:
        """What a closed session has left: ten pieces of ten tokens each, reclaimed one by one, the first first."""
        lease = budget.lease("anna")
        kept = [Memory(lease, 10 * TOKEN) for _ in range(10)]
        lease.close()
        budget.reclaim_by(lambda: bool(kept) and bool(kept.pop(0)))
        return kept

    def test_takes_no_more_than_is_needed(self, budget: CacheBudget, kept: list[Memory]) -> None:
        budget.lease("bert", 35 * TOKEN)
        assert len(kept) == 6
        budget.lease("bert", 5 * TOKEN)
        assert len(kept) == 6

    def test_gives_all_for_one_who_needs_it_all(self, budget: CacheBudget, kept: list[Memory]) -> None:
        budget.lease("bert", CAPACITY)
        assert kept == []

    def test_may_take_memory_of_the_lease_that_needs_it(self, budget: CacheBudget) -> None:
        lease = budget.lease("anna", 10 * TOKEN)
        kept = [Memory(lease, 30 * TOKEN), Memory(lease, 30 * TOKEN)]
        budget.reclaim_by(lambda: bool(kept) and bool(kept.pop()))
        memory = Memory(lease, 50 * TOKEN)
        assert len(kept) == 1 and lease.charged == 80 * TOKEN
        lease.promise(90 * TOKEN)
        lease.promise(CAPACITY)
        assert lease.charged == CAPACITY
        kept.clear()
        del memory
        lease.close()
        budget.lease("bert", CAPACITY)
        with pytest.raises(PeerBusy):
            budget.lease("bert", 1)

    def test_nothing_is_forgotten_for_a_request_that_fails_anyway(
        self, budget: CacheBudget, kept: list[Memory]
    ) -> None:
        with pytest.raises(PeerBusy, match="no room for 101 more tokens in the KV cache: 100 of 100 are left"):
            budget.lease("bert", 101 * TOKEN)
        assert len(kept) == 10


class TestFairness:
    def test_who_has_its_share_leaves_a_quarter_to_newcomers(self, budget: CacheBudget) -> None:
        budget.lease("anna", 40 * TOKEN)
        budget.lease("bert", 10 * TOKEN)
        budget.lease("anna", 10 * TOKEN)  # half of it all: its share
        budget.lease("anna", 15 * TOKEN)  # others need it less
        with pytest.raises(PeerBusy, match=r"no room for 1 more .*: 0 of 100 are left for a client that has its share"):
            budget.lease("anna", 1)
        budget.lease("bert", 5 * TOKEN)
        budget.lease("carl", 20 * TOKEN)
        assert budget.tokens_left == 0

    def test_a_session_that_was_let_in_may_finish(self, budget: CacheBudget) -> None:
        mine = budget.lease("anna", 60 * TOKEN)
        budget.lease("bert", 10 * TOKEN)
        mine.let_in()
        mine.promise(90 * TOKEN)

    def test_memory_that_nobody_leases_is_no_clients(self, budget: CacheBudget) -> None:
        lease = budget.lease("anna")
        memory = Memory(lease, 10 * TOKEN)
        lease.close()
        budget.lease("bert", 90 * TOKEN)  # the only client
        del memory


@pytest.mark.parametrize(
    ("token_bytes", "free_bytes", "expected"),
    [(1000, 50_000_000, 10_000_000), (1000, 0, 1_024_000), (1, 10**12, 2 * 10**11), (0, 0, 0)],
)
def test_default_room_is_a_fifth_of_free_memory_but_some_at_least(
    token_bytes: int, free_bytes: int, expected: int
) -> None:
    assert default_cache_bytes(token_bytes, free_bytes) == expected


def test_threads_that_take_and_drop_memory_lose_nothing(budget: CacheBudget) -> None:
    def work(client: str) -> None:
        for size in range(200):
            lease = budget.lease(client, size % 7)
            memories = [Memory(lease, size % 11) for _ in range(3)]
            del memories[1]
            lease.close()

    threads = [threading.Thread(target=work, args=(f"client {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    budget.lease("anna", CAPACITY)


class Budget(RuleBasedStateMachine):
    """Sessions come, grow, leave memory behind for others and go; a ledger of what they hold says what must be left."""

    leases = Bundle("leases")
    clients = st.sampled_from(["anna", "bert", "carl"])
    sizes = st.integers(0, CAPACITY + 200)

    def __init__(self) -> None:
        super().__init__()
        self.budget = CacheBudget(CAPACITY, TOKEN)
        self.budget.reclaim_by(self.reclaim)
        self.promised: dict[Lease, int] = {}  # open leases
        self.client: dict[Lease, str] = {}
        self.used: list[Piece] = []
        self.kept: list[Piece] = []  # nobody uses it any more

    def reclaim(self) -> bool:
        return bool(self.kept) and bool(self.kept.pop(0))

    def charged(self, lease: Lease) -> int:
        return max(self.promised[lease], self.held(lease))

    def held(self, lease: Lease) -> int:
        return sum(piece.size for piece in (*self.used, *self.kept) if piece.lease is lease)

    def leased(self) -> int:
        return sum(map(self.charged, self.promised))

    def fits(self, lease: Lease, promised: int, added: int) -> bool:
        """Whether there is room once enough is given up: all for one client, beyond a fair share three quarters."""
        everything = list(self.kept)
        try:
            while True:
                amount = max(promised, self.held(lease) + added) - self.charged(lease)
                orphaned = sum(piece.size for piece in self.kept if piece.lease not in self.promised)
                if amount <= 0 or self.leased() + orphaned + amount <= self.limit(self.client[lease], amount):
                    return True
                if not self.kept:
                    return False
                self.kept.pop(0)
        finally:
            self.kept = everything

    def limit(self, client: str, amount: int) -> int:
        by_client = {client: 0}
        for lease in self.promised:
            if self.charged(lease):
                by_client[self.client[lease]] = by_client.get(self.client[lease], 0) + self.charged(lease)
        held = by_client[client]
        beyond = held and len(by_client) > 1 and held + amount > CAPACITY // len(by_client)
        return CAPACITY - CAPACITY // 4 if beyond else CAPACITY

    @rule(target=leases, client=clients)
    def open(self, client: str) -> Lease:
        lease = self.budget.lease(client)
        self.promised[lease], self.client[lease] = 0, client
        return lease

    @rule(lease=leases, size=sizes)
    def promise(self, lease: Lease, size: int) -> None:
        promised = max(self.promised[lease], size)
        if self.fits(lease, promised, 0):
            lease.promise(size)
            self.promised[lease] = promised
        else:
            with pytest.raises(PeerBusy):
                lease.promise(size)

    @rule(lease=leases, size=sizes)
    def take(self, lease: Lease, size: int) -> None:
        if self.fits(lease, self.promised[lease], size):
            self.used.append(Piece(lease, Memory(lease, size), size))
        else:
            with pytest.raises(PeerBusy):
                Memory(lease, size)

    @precondition(lambda self: self.used)
    @rule(number=st.integers(0, 30))
    def drop(self, number: int) -> None:
        del self.used[number % len(self.used)]

    @precondition(lambda self: self.used)
    @rule(number=st.integers(0, 30))
    def keep(self, number: int) -> None:
        self.kept.append(self.used.pop(number % len(self.used)))

    @precondition(lambda self: self.used)
    @rule(number=st.integers(0, 30), share=st.floats(0, 1))
    def shrink(self, number: int, share: float) -> None:
        piece = self.used[number % len(self.used)]
        piece.size = int(piece.size * share)
        piece.memory.charge.shrink(piece.size)

    @rule(lease=consumes(leases))
    def close(self, lease: Lease) -> None:
        self.kept += [piece for piece in self.used if piece.lease is lease]
        self.used = [piece for piece in self.used if piece.lease is not lease]
        lease.close()
        del self.promised[lease], self.client[lease]

    @precondition(lambda self: self.kept)
    @rule()
    def forget(self) -> None:
        self.reclaim()

    @invariant()
    def room_is_what_nobody_holds(self) -> None:
        assert self.budget.tokens_left == (CAPACITY - self.leased()) // TOKEN >= 0
        assert all(lease.charged == self.charged(lease) for lease in self.promised)

    @invariant()
    def never_more_memory_than_there_is(self) -> None:
        assert sum(piece.size for piece in (*self.used, *self.kept)) <= CAPACITY

    def teardown(self) -> None:
        self.used.clear()
        self.kept.clear()
        for lease in self.promised:
            lease.close()
        assert self.budget.tokens_left == CAPACITY // TOKEN
        self.budget.lease("everything", CAPACITY)


TestBudget = Budget.TestCase
TestBudget.settings = settings(phases=[Phase.reuse, Phase.generate])
