"""Rows of keys and values against a model in plain Python: each holds its own positions and nobody else's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from swarm_protocol.errors import PeerBusy
from swarm_server.kv import kv_rows
from swarm_server.kv.kv_cache import CacheBudget, Lease
from swarm_server.kv.kv_rows import Growth, KvRow, PageLayout, grow
from swarm_server.kv.prefix_cache import PrefixCache
from tests.unit.rows import LAYOUTS, read, write

CONTENT = 4  # tokens of a page of content


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> Iterator[None]:
    """So that rows fork, grow and move often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_rows, "FORK_TOKENS", 3)
        patch.setattr(kv_rows, "GROWTH_TOKENS", 4)
        yield


@dataclass
class Generation:
    """One session: its rows, and the tokens that each of them should hold."""

    layout: PageLayout
    lease: Lease
    promised: int
    reserved: int
    rows: tuple[KvRow, ...]
    tokens: tuple[tuple[int, ...], ...]
    settled: int | None = None
    can_match: bool = True  # everything so far came from the prefix cache


class Rows(RuleBasedStateMachine):
    """Sessions over one budget. What a position holds follows from the tokens up to it, so equal beginnings are equal.

    The model of a row is the tuple of its tokens.
    """

    generations = Bundle("generations")
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=10)
    any_row = st.integers(0, 5)

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 120 * LAYOUTS["mixed"].size_bytes(1)
        self.budget = CacheBudget(self.capacity, 1)
        self.prefixes = PrefixCache()
        self.budget.reclaim_by(self.prefixes.reclaim)
        self.open_ones: list[Generation] = []
        self.numbers: dict[tuple[int, ...], int] = {}

    def value(self, tokens: tuple[int, ...]) -> float:
        """What the last of these tokens is known by."""
        return float(self.numbers.setdefault(tokens, len(self.numbers) + 1))

    def digests(self, layout: PageLayout, tokens: tuple[int, ...]) -> list[bytes]:
        ends = range(CONTENT, len(tokens) + 1, CONTENT)
        return [repr((len(layout.groups), layout.groups[0].window, tokens[:end])).encode() for end in ends]

    @rule(
        target=generations,
        layout=st.sampled_from(list(LAYOUTS.values())),
        num_rows=st.integers(1, 3),
        reserved=st.integers(0, 20),
        client=st.sampled_from("ab"),
    )
    def open(self, layout: PageLayout, num_rows: int, reserved: int, client: str) -> Generation:
        try:
            promised = num_rows * layout.size_bytes(reserved)
            lease = self.budget.lease(client, promised)
        except PeerBusy:
            promised, reserved, lease = 0, 0, self.budget.lease(client)
        generation = Generation(layout, lease, promised, reserved, (KvRow.empty(layout),) * num_rows, ((),) * num_rows)
        self.open_ones.append(generation)
        return generation

    @rule(
        generation=generations, tokens=tokens, repeat=st.integers(1, 6), varied=st.booleans(), fails_once=st.booleans()
    )
    def step(self, generation: Generation, tokens: list[int], repeat: int, varied: bool, fails_once: bool) -> None:
        """``varied``: every second row gets other tokens."""
        self.grow(generation, generation.rows, generation.tokens, tokens * repeat, varied, fails_once)

    @rule(generation=generations, removed=st.integers(1, 12), tokens=tokens, fails_once=st.booleans())
    def crop(self, generation: Generation, removed: int, tokens: list[int], fails_once: bool) -> None:
        length = max(0, generation.rows[0].length - removed)
        rows = tuple(row.crop(length, generation.layout) for row in generation.rows)
        if generation.settled is not None and length >= generation.settled:
            assert None not in rows, "a recorded past was dropped"
        if None not in rows:
            settled = generation.settled
            generation.settled = settled if settled is None else length
            cropped = tuple(row[:length] for row in generation.tokens)
            if not self.grow(generation, rows, cropped, tokens, False, fails_once):
                generation.settled = settled
            else:
                generation.can_match = False

    @rule(generation=generations, picked=st.lists(any_row, min_size=1, max_size=4), tokens=tokens)
    def reorder(self, generation: Generation, picked: list[int], tokens: list[int]) -> None:
        picked = [row % len(generation.rows) for row in picked]
        rows = tuple(generation.rows[row] for row in picked)
        self.grow(generation, rows, tuple(generation.tokens[row] for row in picked), tokens, True, False)

    @rule(generation=generations)
    def record_past(self, generation: Generation) -> None:
        generation.settled = generation.rows[0].length

    def grow(
        self,
        generation: Generation,
        rows: tuple[KvRow, ...],
        before: tuple[tuple[int, ...], ...],
        tokens: list[int],
        varied: bool,
        fails_once: bool,
    ) -> bool:
        """What a step does to the rows; whether it was done."""
        layout = generation.layout
        new = [tuple(1 - token if varied and row % 2 else token for token in tokens) for row in range(len(rows))]
        after = tuple(old + more for old, more in zip(before, new, strict=True))
        rows, num_matched = self.matched(generation, rows, after)
        count = len(tokens) - num_matched
        if count:
            try:
                growth = self.growth(generation, rows, count)
            except PeerBusy:
                return False
            if fails_once:
                write(growth.rows, layout, torch.full((len(rows), count), -1.0))
                growth.undo()
                del growth
                growth = self.growth(generation, rows, count)
            rows = growth.rows
            write(rows, layout, self.values(after, count))
        generation.rows, generation.tokens = rows, after
        generation.can_match = generation.can_match and count == 0
        self.remember(generation)
        return True

    def growth(self, generation: Generation, rows: tuple[KvRow, ...], count: int) -> Growth:
        one = generation
        return grow(one.rows, rows, count, one.layout, one.lease, reserved=one.reserved, settled=one.settled)

    def values(self, tokens: Sequence[tuple[int, ...]], count: int) -> torch.Tensor:
        """[rows, count] of the last positions."""
        return torch.tensor(
            [[self.value(row[:end]) for end in range(len(row) - count + 1, len(row) + 1)] for row in tokens]
        )

    def matched(
        self, generation: Generation, rows: tuple[KvRow, ...], after: Sequence[tuple[int, ...]]
    ) -> tuple[tuple[KvRow, ...], int]:
        """Rows with the pages of content that the prefix cache knows, and how many positions these are."""
        start = rows[0].length
        if not generation.can_match or start % CONTENT:
            return rows, 0
        found = [self.prefixes.longest(self.digests(generation.layout, tokens)[start // CONTENT :]) for tokens in after]
        num_pages = min(map(len, found))
        for page in range(num_pages):
            rows = tuple(row.extended(pages[page], CONTENT) for row, pages in zip(rows, found, strict=True))
        return rows, num_pages * CONTENT

    def remember(self, generation: Generation) -> None:
        for row, tokens in zip(generation.rows, generation.tokens, strict=True):
            for page, digest in enumerate(self.digests(generation.layout, tokens)):
                parts = row.slice(page * CONTENT, (page + 1) * CONTENT)
                if parts is not None:
                    self.prefixes.add(digest, parts)

    @precondition(lambda self: len(self.prefixes))
    @rule()
    def reclaim(self) -> None:
        assert self.prefixes.reclaim()

    @rule(generation=consumes(generations))
    def close(self, generation: Generation) -> None:
        self.open_ones.remove(generation)
        rows, generation.rows = generation.rows, ()
        generation.lease.close()
        for page in {part.page for row in rows for parts in row.parts for part in parts}:
            if page.lease is generation.lease and any(page.pinned):
                page.trim()

    @invariant()
    def every_row_holds_its_own(self) -> None:
        for generation in self.open_ones:
            layout, length = generation.layout, len(generation.tokens[0])
            assert {row.length for row in generation.rows} == {length}
            expected = self.values(generation.tokens, length).tolist()
            for number, (group, kept) in enumerate(zip(layout.groups, read(generation.rows, layout), strict=True)):
                for row, values, whole in zip(generation.rows, kept, expected, strict=True):
                    assert row.kept(number) == len(values)
                    assert values == whole[length - len(values) :]
                    assert len(values) >= min(length, math.inf if group.window is None else group.window - 1)

    @invariant()
    def memory_is_what_rows_and_prefixes_use(self) -> None:
        used = {part.page for one in self.open_ones for row in one.rows for parts in row.parts for part in parts}
        used |= {part.page for entry in self.prefixes._entries.values() for parts in entry for part in parts}
        size = {page: sum(data.nbytes for data in page.data) for page in used}
        leased = 0
        for generation in self.open_ones:
            held = sum(size for page, size in size.items() if page.lease is generation.lease)
            assert generation.lease.charged == max(generation.promised, held)
            leased += generation.lease.charged
        assert self.budget.tokens_left == self.capacity - leased >= 0
        assert sum(size.values()) <= self.capacity

    def teardown(self) -> None:
        for generation in list(self.open_ones):
            self.close(generation)
        while self.prefixes.reclaim():
            pass
        self.budget.lease("everything", self.capacity)


TestRows = Rows.TestCase
TestRows.settings = settings(phases=[Phase.reuse, Phase.generate], max_examples=50)
