"""Content is known by what was sent, in whatever pieces; what was not used for longest is forgotten first."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.kv.kv_cache import CacheBudget, Lease
from swarm_server.kv.kv_rows import KvRow, PageLayout, grow
from swarm_server.kv.offload import KvOffload
from swarm_server.kv.prefix_cache import ContentHash, PrefixCache, next_contents, token_content
from tests.unit.rows import LAYOUTS
from tests.unit.support import TIMEOUT_S

HIDDEN = 5
TOKENS = 3 * PAGE_TOKENS + 7
SEED = b"blocks 0:4"
GENERATOR = torch.Generator().manual_seed(0)
STATES = torch.randn(1, TOKENS, HIDDEN, generator=GENERATOR)
POSITIONS = torch.arange(TOKENS)[None]
MASK = torch.ones(1, TOKENS, dtype=torch.long)


def digests(content: torch.Tensor, *cuts: int, seed: bytes = SEED) -> list[bytes]:
    """Of one row's content, added in pieces."""
    content_hash, result = ContentHash(seed), []
    for piece in torch.tensor_split(content, sorted(cuts)):
        content_hash, more = content_hash.added(piece)
        result += more
    return result


def content(hidden: torch.Tensor = STATES, positions: torch.Tensor = POSITIONS, mask: torch.Tensor = MASK):
    return token_content(hidden, positions, mask)[0]


class TestDigests:
    def test_there_is_one_for_each_full_page(self) -> None:
        known = digests(content())
        assert len(known) == len(set(known)) == TOKENS // PAGE_TOKENS
        assert digests(content()[: PAGE_TOKENS - 1]) == []
        assert digests(content()[:PAGE_TOKENS]) == known[:1]

    @given(st.sets(st.integers(1, TOKENS - 1), max_size=8))
    def test_do_not_depend_on_the_pieces(self, cuts: set[int]) -> None:
        assert digests(content(), *cuts) == digests(content())

    @given(st.integers(0, TOKENS - 1), st.sampled_from(["hidden", "position", "mask"]))
    def test_differ_from_the_first_difference_on(self, place: int, what: str) -> None:
        hidden, positions, mask = STATES.clone(), POSITIONS.clone(), MASK.clone()
        if what == "hidden":
            hidden[0, place, place % HIDDEN] += 1e-6
        elif what == "position":
            positions[0, place] += 1
        else:
            mask[0, place] = 0
        known, other = digests(content()), digests(content(hidden, positions, mask))
        page = place // PAGE_TOKENS
        assert other[:page] == known[:page]
        assert not set(other[page:]) & set(known)

    def test_differ_with_the_seed(self) -> None:
        assert not set(digests(content(), seed=b"blocks 0:5")) & set(digests(content()))

    def test_depend_on_everything_before(self) -> None:
        """The same page behind another is another."""
        whole = content()
        first, second = digests(torch.cat([whole[:PAGE_TOKENS], whole[:PAGE_TOKENS]]))
        assert first != second

    def test_of_a_copy_go_their_own_way(self) -> None:
        start, _ = ContentHash(SEED).added(content()[:40])
        one, rest = start.added(content()[40:])
        _, other = start.added(content()[41:])
        assert rest == digests(content())[1:] and not set(other) & set(rest)
        assert one is not start

    def test_the_same_bytes_are_other_content_as_other_numbers(self) -> None:
        states = STATES.bfloat16()
        assert not set(digests(content(states.view(torch.float16)))) & set(digests(content(states)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_next_positions_of_many_texts_have_the_content_that_they_have_in_a_prompt(dtype: torch.dtype) -> None:
    states = STATES.to(dtype)
    known = content(states)
    starts = [0, 7, TOKENS - 1, 7]
    assert next_contents(states[0, starts][:, None], starts) == [known[start].numpy().tobytes() for start in starts]


def test_rows_of_a_batch_are_known_by_their_own_content() -> None:
    hidden = torch.cat([STATES, STATES + 1, STATES])
    positions, mask = POSITIONS.expand(3, -1), MASK.repeat(3, 1)
    first, second, third = token_content(hidden, positions, mask)
    assert digests(first) == digests(third) == digests(content())
    assert not set(digests(second)) & set(digests(first))


# ------------------------------------------------------------ the cache


class Memory:
    """Rows in a budget of so many positions, whose reclaiming is that of a prefix cache."""

    def __init__(self, capacity: int) -> None:
        self.layout: PageLayout = LAYOUTS["mixed"]
        self.budget = CacheBudget(self.layout.size_bytes(capacity), self.layout.size_bytes(1))
        self.prefixes = PrefixCache()
        self.budget.reclaim_by(self.prefixes.reclaim)

    def lease(self) -> Lease:
        return self.budget.lease("anna")

    def row(self, lease: Lease, num_tokens: int = 4) -> KvRow:
        """With a page of its own."""
        empty = (KvRow.empty(self.layout),)
        (row,) = grow(empty, empty, num_tokens, self.layout, lease).rows
        return row

    def remember(self, *digests: bytes) -> None:
        """Pages of content of one closed session each, of 4 positions."""
        for digest in digests:
            lease = self.lease()
            self.prefixes.add(digest, self.row(lease).parts)
            lease.close()

    def known(self) -> set[bytes]:
        return {digest for digest in (b"a", b"b", b"c", b"d") if digest in self.prefixes._entries}


def test_content_is_found_from_the_first_page_on() -> None:
    memory = Memory(100)
    assert memory.prefixes.longest([b"a", b"b"]) == []
    memory.remember(b"a", b"b", b"d")
    found = memory.prefixes.longest([b"a", b"b", b"c", b"d"])
    assert len(found) == 2 and len(memory.prefixes) == 3
    assert found == [memory.prefixes.longest([digest])[0] for digest in (b"a", b"b")]
    assert memory.prefixes.longest([b"c", b"d"]) == []


def test_a_page_that_cannot_be_packed_is_forgotten(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """So is one for which a GPU has no memory: whoever needs the room gets it."""
    memory = Memory(4)
    memory.prefixes = PrefixCache(offload=KvOffload(1000))
    memory.budget.reclaim_by(memory.prefixes.reclaim)
    memory.remember(b"a")

    def pack(_parts: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("swarm_server.kv.prefix_cache.pack_parts", pack)
    memory.remember(b"b")
    assert memory.known() == {b"b"} and memory.prefixes.read_back(b"a") is None
    assert "a page of a prompt cannot leave the cache: out of memory" in caplog.text


def test_what_is_known_stays_where_it_was_first() -> None:
    memory = Memory(100)
    memory.remember(b"a")
    (first,) = memory.prefixes.longest([b"a"])
    memory.remember(b"a")
    assert memory.prefixes.longest([b"a"]) == [first]


def test_what_is_kept_may_not_be_filled_with_anything_else() -> None:
    memory = Memory(100)
    row = memory.row(memory.lease(), 8)
    memory.prefixes.add(b"a", row.slice(2, 6))
    memory.prefixes.add(b"b", row.slice(0, 4))
    assert {page.pinned[part.row] for parts in row.parts for part in parts for page in [part.page]} == {6}


@pytest.mark.parametrize(
    ("used", "order"),
    [
        ([], [b"a", b"b", b"c"]),
        ([[b"a"]], [b"b", b"c", b"a"]),
        ([[b"b"], [b"a"]], [b"c", b"b", b"a"]),
        ([[b"b", b"c"]], [b"a", b"c", b"b"]),  # what follows goes first: it is of no use without what comes before
    ],
)
@pytest.mark.parametrize("method", [PrefixCache.longest, PrefixCache.touch])
def test_what_was_not_used_for_longest_is_forgotten_first(method, used: list[list[bytes]], order: list[bytes]) -> None:
    memory = Memory(100)
    memory.remember(b"a", b"b", b"c")
    for pages in used:
        method(memory.prefixes, pages)
    for number in range(len(order)):
        assert memory.known() == set(order[number:])
        assert memory.prefixes.reclaim()
    assert not memory.prefixes.reclaim()


def test_as_much_is_forgotten_as_somebody_needs() -> None:
    memory = Memory(16)
    memory.remember(b"a", b"b", b"c", b"d")
    assert memory.budget.tokens_left == 16
    row = memory.row(memory.lease(), 5)
    assert row.length == 5 and memory.known() == {b"c", b"d"}


def test_memory_comes_back_when_neither_a_prefix_nor_a_row_needs_it() -> None:
    memory = Memory(16)
    lease = memory.lease()
    row = memory.row(lease, 12)
    memory.prefixes.add(b"a", row.slice(0, 4))
    memory.prefixes.add(b"b", row.slice(4, 8))
    lease.close()
    other = KvRow.empty(memory.layout).extended(memory.prefixes.longest([b"a"])[0], 4)
    del row
    assert memory.prefixes.reclaim() and memory.prefixes.reclaim()
    assert not fits(memory, 5)  # the other row still reads it
    del other
    assert fits(memory, 16)


def fits(memory: Memory, num_tokens: int) -> bool:
    lease = memory.lease()
    try:
        lease.promise(memory.layout.size_bytes(num_tokens))
    except Exception:
        return False
    finally:
        lease.close()
    return True


def test_memory_may_die_while_room_is_asked_back() -> None:
    """Garbage collection may come at any time, in any thread."""
    memory = Memory(16)
    memory.remember(b"a", b"b")
    rows = [memory.row(memory.lease(), 4)]
    inside, asked = threading.Event(), threading.Event()

    class Digest(bytes):
        """The prefix cache looks for it while it holds its lock."""

        def __hash__(self) -> int:
            inside.set()
            asked.wait(TIMEOUT_S)
            rows.clear()
            return 0

    def reclaim() -> bool:
        asked.set()
        return memory.prefixes.reclaim()

    memory.budget.reclaim_by(reclaim)
    searching = threading.Thread(target=memory.prefixes.longest, args=([Digest()],), daemon=True)
    searching.start()
    assert inside.wait(TIMEOUT_S)
    asking = threading.Thread(target=memory.row, args=(memory.lease(), 6), daemon=True)
    asking.start()
    for thread in (searching, asking):
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the threads wait for each other"
