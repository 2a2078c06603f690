"""What sessions share does them no harm, and what they leave behind is gone at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput, unstacked
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.blocks.blocks import BlockStack
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Reorder, SessionStep
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.prefix_cache import PrefixCache
from tests.unit.server.engine.test_engine import HOSTED, Generation, run
from tests.zoo import HIDDEN


@pytest.fixture
def engine(llama: BlockStack) -> Engine:
    return Engine(llama, prefix_cache=PrefixCache())


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions of each row go through the blocks, batch by batch."""
    counts: list[int] = []
    run_part = engine._run_part

    def run_counted(blocks, batch, hidden):
        counts.append(hidden[0].shape[1])
        return run_part(blocks, batch, hidden)

    monkeypatch.setattr(engine, "_run_part", run_counted)
    return counts


@pytest.fixture
def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted(engine, monkeypatch)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_mask_that_hides_what_came_before_is_other_content(engine: Engine, budget: CacheBudget) -> None:
    shared = torch.randn(1, 2 * PAGE_TOKENS, HIDDEN)
    first = Generation.open(engine, budget, seed=1)
    run(engine, (first, first.step(0, hidden=shared[:, :PAGE_TOKENS])))
    mask = torch.ones(1, 2 * PAGE_TOKENS, dtype=torch.long)
    mask[:, : PAGE_TOKENS - 5] = 0
    positions = torch.arange(PAGE_TOKENS, 2 * PAGE_TOKENS)[None]
    hiding = SessionStep(PAGE_TOKENS, BlockInput(shared[:, PAGE_TOKENS:], mask, positions))
    engine.run([(first.session, hiding)])
    second = Generation.open(engine, budget, seed=2)
    prompt = torch.cat([shared, torch.randn(1, 3, HIDDEN)], 1)
    second.check(*run(engine, (second, second.step(0, hidden=prompt, num_wanted=1))), 1)


@pytest.mark.parametrize("keeps_outputs", [False, True])
def test_padding_is_content_as_well(engine: Engine, budget: CacheBudget, computed: list[int], keeps_outputs) -> None:
    prompt = torch.randn(2, 2 * PAGE_TOKENS + 3, HIDDEN)
    options = {"batch_size": 2, "keeps_outputs": keeps_outputs}
    for padded in (4, 4, 5):
        generation = Generation.open(engine, budget, padded=padded, **options)
        generation.check(*run(engine, (generation, generation.step(0, hidden=prompt, num_wanted=1))), 1)
    assert computed == [2 * PAGE_TOKENS + 3, 3, 2 * PAGE_TOKENS + 3]


@pytest.mark.parametrize("chunk", [4 * PAGE_TOKENS + 1, 2 * PAGE_TOKENS, PAGE_TOKENS])
@pytest.mark.parametrize("keeps_outputs", [False, True])
def test_equal_prompts_in_pieces_of_whole_pages(
    engine: Engine, budget: CacheBudget, computed: list[int], keeps_outputs: bool, chunk: int
) -> None:
    prompt = torch.randn(1, 4 * PAGE_TOKENS + 1, HIDDEN)
    for _ in range(2):
        computed.clear()
        generation = Generation.open(engine, budget, keeps_outputs=keeps_outputs)
        for piece in prompt.split(chunk, 1):
            is_last = generation.hidden.shape[1] + piece.shape[1] == prompt.shape[1]
            (output,) = run(engine, (generation, generation.step(0, hidden=piece, num_wanted=int(is_last))))
        generation.check(output, 1)
    assert computed == [1]


@pytest.mark.parametrize("pieces", [(1,) * (2 * PAGE_TOKENS), (5, *(1,) * 40, *(19,) * 1), (40, 7, 17)])
def test_what_was_decoded_is_found_as_a_prompt(
    engine: Engine, budget: CacheBudget, computed: list[int], pieces: tuple[int, ...]
) -> None:
    content = torch.randn(1, 2 * PAGE_TOKENS + 1, HIDDEN)
    first = Generation.open(engine, budget)
    for number, hidden in enumerate(content[:, : 2 * PAGE_TOKENS].split(pieces, 1)):
        step = first.step(0, hidden=hidden)
        if number % 2:
            step = replace(step, inputs=replace(step.inputs, position_ids=None))
        first.check(*run(engine, (first, step)), hidden.shape[1])
    computed.clear()
    second = Generation.open(engine, budget)
    second.check(*run(engine, (second, second.step(0, hidden=content, num_wanted=1))), 1)
    assert computed == [1]


def test_rows_that_are_reordered_within_a_page_take_their_content_along(
    engine: Engine, budget: CacheBudget, computed: list[int]
) -> None:
    first = Generation.open(engine, budget, batch_size=2)
    run(engine, (first, first.step(PAGE_TOKENS - 3)))
    run(engine, (first, first.step(1)))
    run(engine, (first, first.step(2, Reorder((1, 0)))))
    last = torch.randn(1, 1, HIDDEN)
    for row in range(2):
        computed.clear()
        second = Generation.open(engine, budget)
        prompt = torch.cat([first.hidden[row : row + 1], last], 1)
        second.check(*run(engine, (second, second.step(0, hidden=prompt, num_wanted=1))), 1)
        assert computed == [1]


@pytest.mark.parametrize("between_owners", [False, True])
def test_between_whom_content_is_shared(
    llama: BlockStack, budget: CacheBudget, monkeypatch: pytest.MonkeyPatch, between_owners: bool
) -> None:
    """Session by session: those of one owner share always, and each owner's first with others only if they may."""
    engine = Engine(llama, prefix_cache=PrefixCache(between_owners=between_owners))
    counts = counted(engine, monkeypatch)
    prompt = torch.randn(1, 2 * PAGE_TOKENS + 3, HIDDEN)
    for owner in ("ada", "ada", "bob", "bob", "ada"):
        generation = Generation.open(engine, budget, owner=owner)
        generation.check(*run(engine, (generation, generation.step(0, hidden=prompt, num_wanted=1))), 1)
        engine.close(generation.session)
    whole = 2 * PAGE_TOKENS + 3
    assert counts == [whole, 3, 3 if between_owners else whole, 3, 3]


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_refused_step_holds_nothing_of_its_batch(llama: BlockStack) -> None:
    engine = Engine(llama)
    layout = engine.layout_of(HOSTED, False)
    budget = CacheBudget(layout.size_bytes(20), layout.size_bytes(1))
    good, bad = (Generation.open(engine, budget, seed=seed) for seed in (1, 2))
    infinite = torch.full((1, 6, HIDDEN), torch.inf)
    output, error = run(engine, (good, good.step(6)), (bad, bad.step(6, hidden=infinite)))
    good.check(output)
    assert isinstance(error, RequestRejected)
    for generation in (good, bad):
        engine.close(generation.session)
    del error
    budget.lease("next", budget.capacity_bytes)


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_session_without_room_holds_nothing(llama: BlockStack) -> None:
    engine = Engine(llama)
    layout = engine.layout_of(HOSTED, False)
    budget = CacheBudget(layout.size_bytes(20), layout.size_bytes(1))
    generation = Generation.open(engine, budget)
    for num_tokens, error in ((6, None), (30, PeerBusy)):
        (output,) = run(engine, (generation, generation.step(num_tokens)))
        assert error is None or isinstance(output, error)
    del output
    engine.close(generation.session)
    budget.lease("next", budget.capacity_bytes)


def test_a_session_may_change_its_number_format_within_a_page(engine: Engine, budget: CacheBudget) -> None:
    hidden = torch.randn(1, 2 * PAGE_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    ends = (3, 7, PAGE_TOKENS + 1, 2 * PAGE_TOKENS)
    pieces = [
        hidden[:, start:end].to(dtype)
        for start, end, dtype in zip(
            (0, *ends), ends, (torch.float32, torch.bfloat16, torch.float16, torch.float32), strict=False
        )
    ]
    outputs = []
    session = engine.open(HOSTED, 1, budget.lease(""))
    for piece in pieces:
        (output,) = engine.run([(session, SessionStep(session.length, BlockInput(piece)))])
        assert isinstance(output, torch.Tensor) and output.dtype == piece.dtype
        outputs.append(output.float())
    sent = torch.cat([piece.float() for piece in pieces], 1)
    expected = engine.stateless.forward(HOSTED, BlockInput(sent))
    assert (torch.cat(outputs, 1) - expected).abs().max() <= 1e-2 * expected.abs().max()
    assert len(session.state.digests[0]) == 2


def block_by_block(engine: Engine, blocks: Span, hidden: torch.Tensor, additions: torch.Tensor) -> torch.Tensor:
    """The output of the blocks, of which the first are computed one by one, without a cache."""
    num_added = min(additions.shape[2], blocks.end)
    for block in range(blocks.start, num_added):
        hidden = engine.stateless.forward(Span(block, block + 1), BlockInput(hidden)) + additions[:, :, block]
    rest = Span(num_added, blocks.end) if num_added < blocks.end else None
    return hidden if rest is None else engine.stateless.forward(rest, BlockInput(hidden))


def test_additions_beside_other_sessions(engine: Engine, budget: CacheBudget) -> None:
    """The blocks after which nothing is added may be on this server or on the next."""
    seeing = [Generation.open(engine, budget, Span(0, end), 2, seed=end, keeps_outputs=True) for end in (2, 5)]
    other = Generation.open(engine, budget, seed=9)
    added = torch.randn(2, 7, 3, HIDDEN)
    steps = [(each, each.step(7)) for each in seeing]
    steps = [(each, replace(step, inputs=replace(step.inputs, additions=added))) for each, step in steps]
    *outputs, of_other = run(engine, *steps, (other, other.step(7)))
    other.check(of_other)
    for generation, output in zip(seeing, outputs, strict=True):
        hidden, rest = unstacked(output)
        expected = block_by_block(engine, generation.session.blocks, generation.hidden, added)
        assert (hidden - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert rest is None if generation is seeing[1] else torch.equal(rest, added)


@pytest.mark.parametrize("keeps_outputs", [False, True])
def test_additions_are_content_as_well(engine: Engine, budget: CacheBudget, keeps_outputs: bool) -> None:
    """Pages with other additions, or none, are others; pages of text are the same whatever they came with."""
    pages, size = 4, PAGE_TOKENS
    prompt, added = torch.randn(1, pages * size, HIDDEN), torch.zeros(1, pages * size, 3, HIDDEN)
    added[:, size + 5 : size + 9] = torch.randn(1, 4, 3, HIDDEN)
    for additions, chunk, num_reused in (
        (added, pages * size, 0),
        (added, size, pages if keeps_outputs else pages - 1),
        (torch.zeros_like(added), pages * size, 1),
        (-added, pages * size, 1),
    ):
        before = engine.counters.positions["reused"]
        generation = Generation.open(engine, budget, Span(0, 2), keeps_outputs=keeps_outputs)
        for hidden, here in zip(prompt.split(chunk, 1), additions.split(chunk, 1), strict=True):
            is_last = generation.hidden.shape[1] + chunk == pages * size
            step = generation.step(0, hidden=hidden, num_wanted=size if is_last else 0)
            (output,) = run(engine, (generation, replace(step, inputs=replace(step.inputs, additions=here))))
            last, rest = unstacked(output)
            assert torch.equal(here, torch.zeros_like(here) if rest is None else rest)
        expected = block_by_block(engine, Span(0, 2), prompt, additions)
        assert (last - expected[:, -last.shape[1] :])[:, -size:].abs().max() <= 1e-5 * expected.abs().max()
        assert engine.counters.positions["reused"] - before == num_reused * size


def test_prompts_of_which_the_cache_has_parts_share_a_batch(
    engine: Engine, budget: CacheBudget, computed: list[int]
) -> None:
    prompt = torch.randn(1, 3 * PAGE_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))
    first, second, other = (Generation.open(engine, budget, seed=seed) for seed in (1, 2, 3))
    run(engine, (first, first.step(0, hidden=prompt[:, : 2 * PAGE_TOKENS])))
    computed.clear()
    steps = (
        (second, second.step(0, hidden=prompt, num_wanted=1)),
        (other, other.step(3 * PAGE_TOKENS, num_wanted=1)),
    )
    for (generation, _), output in zip(steps, run(engine, *steps), strict=True):
        generation.check(output, 1)
    assert sorted(computed) == [PAGE_TOKENS, 3 * PAGE_TOKENS]
