"""Sessions in one batch compute what each would alone, for every family: joining, growing, cropped, reordered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import PeerBusy, RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.core.counters import Counters
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import (
    Crop,
    HistoryChange,
    NextPositions,
    RecordPast,
    Reorder,
    Results,
    Session,
    SessionStep,
)
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.prefix_cache import PrefixCache
from tests.families import UNLIKE
from tests.marks import SLOW, always
from tests.zoo import BLOCKS, HIDDEN, SLIDING, SUPPORTED, save_checkpoint

TOLERANCE = 1e-5  # relative
OF_STATES = 2e-4  # families compute several tokens of a recurrence in another way than one, also on one machine
HOSTED = Span(0, BLOCKS)
PLENTY = 1 << 30
# All positions, windows, chunks, an index, two states
KINDS = ("llama", "mistral-sliding", "llama4_text", "deepseek_v32", "lfm2", "qwen3_next")
OF_KINDS = pytest.mark.parametrize("engine", always(*KINDS, among=UNLIKE), indirect=True)


@dataclass
class Generation:
    """One session, and everything that was ever sent to it."""

    engine: Engine
    session: Session
    mask: torch.Tensor  # [batch, positions so far]
    hidden: torch.Tensor = field(repr=False)
    generator: torch.Generator = field(repr=False)

    @classmethod
    def open(
        cls,
        engine: Engine,
        budget: CacheBudget,
        blocks: Span = HOSTED,
        batch_size: int = 1,
        padded: int = 0,
        seed: int = 0,
        **options,
    ) -> Generation:
        """``padded``: positions of the first row that are padding."""
        session = engine.open(blocks, batch_size, budget.lease(f"client {seed}"), **options)
        mask = torch.ones(batch_size, padded, dtype=torch.long)
        mask[0] = 0
        generator = torch.Generator().manual_seed(seed)
        return cls(engine, session, mask, torch.empty(batch_size, 0, HIDDEN), generator)

    def step(
        self, num_tokens: int, *changes: HistoryChange, hidden: torch.Tensor | None = None, **options
    ) -> SessionStep:
        """The next step; what it does to the content is remembered as if it had succeeded."""
        for change in changes:
            if isinstance(change, Reorder):
                self.hidden, self.mask = self.hidden[list(change.indices)], self.mask[list(change.indices)]
            elif isinstance(change, Crop):
                self.hidden, self.mask = self.hidden[:, : change.length], self.mask[:, : change.length]
        start = self.hidden.shape[1]
        if hidden is None:
            hidden = torch.randn(len(self.hidden), num_tokens, HIDDEN, generator=self.generator)
        self.hidden = torch.cat([self.hidden, hidden], 1)
        missing = self.hidden.shape[1] - self.mask.shape[1]
        if missing > 0:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), missing)], 1)
        mask = self.mask[:, : self.hidden.shape[1]]
        inputs = BlockInput(hidden, None if bool(mask.all()) else mask, self.positions()[:, start:])
        return SessionStep(start, inputs, changes, **options)

    def positions(self) -> torch.Tensor:
        return (self.mask[:, : self.hidden.shape[1]].cumsum(-1) - 1).clamp(min=0)

    def expected(self) -> torch.Tensor:
        """Hidden states after the session's blocks at all positions, from one pass without any cache."""
        mask = self.mask[:, : self.hidden.shape[1]]
        return self.engine.stateless.forward(
            self.session.blocks, BlockInput(self.hidden, None if bool(mask.all()) else mask, self.positions())
        )

    def check(self, output: torch.Tensor | Exception, num_tokens: int | None = None) -> None:
        """``num_tokens``: how many of the last outputs matter."""
        if isinstance(output, Exception):
            raise output
        num_tokens = num_tokens or output.shape[1]
        attended = self.mask[:, : self.hidden.shape[1]][:, -num_tokens:].bool()
        expected = self.expected()
        error = (output[:, -num_tokens:] - expected[:, -num_tokens:])[attended].abs().max()
        tolerance = OF_STATES if self.session.layout.slots else TOLERANCE
        assert error <= tolerance * expected.abs().max(), error


def run(engine: Engine, *steps: tuple[Generation, SessionStep]) -> list:
    return engine.run([(generation.session, step) for generation, step in steps])


def advance(engine: Engine, generations: list[Generation], num_tokens: int, *changes: HistoryChange) -> None:
    """One batch of all, checked."""
    steps = [(generation, generation.step(num_tokens, *changes)) for generation in generations]
    for (generation, _), output in zip(steps, run(engine, *steps), strict=True):
        generation.check(output, num_tokens)


def next_of(*generations: Generation) -> NextPositions:
    """The next position of each."""
    steps = [generation.step(1) for generation in generations]
    sessions, starts = [generation.session for generation in generations], [step.start for step in steps]
    return NextPositions(sessions, starts, torch.cat([step.inputs.hidden for step in steps]))


def of_each(results: Results) -> list[torch.Tensor | Exception]:
    assert not isinstance(results, Exception)
    return results if isinstance(results, list) else list(results.split(1))


@pytest.fixture
def engine(request: pytest.FixtureRequest, stack_of: Callable[[str], BlockStack]) -> Engine:
    return Engine(stack_of(request.param))


Outputs = dict[int, list[torch.Tensor]]


def grow(engine: Engine, outputs: Outputs, generations: list[Generation], num_tokens: int) -> None:
    """Run one batch of all, and add what each is answered to its outputs, to be checked at the end."""
    steps = [(generation, generation.step(num_tokens)) for generation in generations]
    for (generation, _), output in zip(steps, run(engine, *steps), strict=True):
        assert isinstance(output, torch.Tensor), output
        outputs.setdefault(id(generation), []).append(output)


class TestEveryFamily:
    @pytest.mark.parametrize("engine", always(*KINDS, "bloom", "mamba2", among=SUPPORTED), indirect=True)
    def test_sessions_of_different_lengths_batches_and_spans(self, engine: Engine, budget: CacheBudget) -> None:
        everyone = [
            Generation.open(engine, budget, seed=1),
            Generation.open(engine, budget, batch_size=3, padded=2, seed=2),
            Generation.open(engine, budget, Span(2, BLOCKS), seed=3),
            Generation.open(engine, budget, Span(0, 3), batch_size=2, seed=4),
            Generation.open(engine, budget, Span(3, 5), seed=5),
        ]
        outputs: Outputs = {}
        for generation, num_tokens in zip(everyone, (5, 4, SLIDING + 3, 1, 2), strict=True):
            grow(engine, outputs, [generation], num_tokens)
        for _ in range(SLIDING):
            grow(engine, outputs, everyone, 1)
        grow(engine, outputs, everyone[1:4], 1)  # some leave
        late = Generation.open(engine, budget, seed=6)
        grow(engine, outputs, [late], 3)
        grow(engine, outputs, [*everyone, late], 1)
        grow(engine, outputs, [everyone[0], everyone[2]], 3)  # several positions at once, as speculation sends them
        for generation in (*everyone, late):
            generation.check(torch.cat(outputs[id(generation)], 1))

    @OF_KINDS
    def test_outputs_of_every_block_beside_other_sessions(self, engine: Engine, budget: CacheBudget) -> None:
        watched = Generation.open(engine, budget, Span(1, 5), 2, padded=1)
        other = Generation.open(engine, budget, seed=1)
        for num_tokens in (SLIDING + 3, 1):
            steps = (watched, watched.step(num_tokens, every_block=True)), (other, other.step(num_tokens))
            outputs, output = run(engine, *steps)
            other.check(output)
            for end, found in zip(range(2, 6), outputs, strict=True):
                watched.session.blocks = Span(1, end)  # for what is expected
                watched.check(found)

    @pytest.mark.parametrize(
        ("engine", "keeps_outputs"),
        [
            *(pytest.param(name, True, marks=() if name in KINDS else SLOW) for name in UNLIKE),
            *(pytest.param(name, False, marks=SLOW) for name in KINDS),
        ],
        indirect=["engine"],
    )
    def test_a_copy_of_a_session_goes_on_like_it(
        self, engine: Engine, budget: CacheBudget, keeps_outputs: bool
    ) -> None:
        original = Generation.open(engine, budget, batch_size=2, padded=1, keeps_outputs=keeps_outputs)
        advance(engine, [original], 3 * SLIDING + 5)
        advance(engine, [original], 1)
        copy = engine.open(HOSTED, 2, budget.lease("copy"), keeps_outputs=keeps_outputs)
        length = original.session.length
        for start in range(0, length, 7):
            engine.adopt(copy, start, (), engine.stored(original.session, start, min(start + 7, length)))
        for changes in ((), (Reorder((1, 0, 1)),), (), (Reorder((0, 2)),)):
            advance(engine, [original], 2, *changes)
            stored = engine.stored(original.session, original.session.length - 2, original.session.length)
            engine.adopt(copy, original.session.length - 2, changes, stored)
        if keeps_outputs:
            whole = engine.outputs(original.session, 0, original.session.length)
            assert torch.equal(engine.outputs(copy, 0, copy.length), whole)
        original.session = copy
        for num_tokens in (1, SLIDING, 1):
            advance(engine, [original], num_tokens)

    @OF_KINDS
    def test_reorder_and_crop(self, engine: Engine, budget: CacheBudget) -> None:
        beams, other = Generation.open(engine, budget, seed=1), Generation.open(engine, budget, seed=2)
        advance(engine, [beams], 6, RecordPast())
        advance(engine, [other], 3)
        for indices in ((0, 0, 0), (2, 0, 0), (1, 1, 2), (0, 2, 1), (1, 2)):
            steps = [(beams, beams.step(1, Reorder(indices))), (other, other.step(1))]
            for (generation, _), output in zip(steps, run(engine, *steps), strict=True):
                generation.check(output)
        length = beams.session.length
        if not beams.session.layout.crops_states:
            (output,) = engine.run([(beams.session, SessionStep(length - 3, BlockInput(torch.zeros(2, 1, HIDDEN))))])
            assert isinstance(output, RequestRejected) and "cannot be taken out of it" in str(output)
            advance(engine, [beams], 3)
            advance(engine, [beams], 3, Crop(length))  # the last step again
            return
        advance(engine, [beams], 3, Crop(length - 2))
        advance(engine, [beams], 1, Crop(length - 1), Reorder((1, 0)))

    @OF_KINDS
    def test_windows_are_dropped_far_beyond_them(self, engine: Engine, budget: CacheBudget) -> None:
        generation = Generation.open(engine, budget)
        other = Generation.open(engine, budget, seed=1)
        advance(engine, [other], 1)
        for _ in range(6):
            advance(engine, [generation], 37)
        for _ in range(3):
            advance(engine, [generation, other], 1)
        for group, row_group in zip(
            generation.session.layout.groups, generation.session.state.rows[0].parts, strict=True
        ):
            assert sum(map(len, row_group)) <= group.most


@pytest.mark.cuda
def test_sessions_share_batches_on_cuda(tmp_path) -> None:
    save_checkpoint("llama", tmp_path)
    engine = Engine(load_blocks(ModelCheckpoint.open(tmp_path), HOSTED, device="cuda"))
    everyone = [Generation.open(engine, CacheBudget(PLENTY, 1), batch_size=rows, seed=rows) for rows in (1, 3)]
    for generation, num_tokens in zip(everyone, (5, 2 * PAGE_TOKENS), strict=True):
        advance(engine, [generation], num_tokens)
    for _ in range(4):
        advance(engine, everyone, 1)


class TestPrefixReuse:
    @pytest.mark.parametrize("keeps_outputs", [False, True])
    def test_equal_content_is_not_computed_again(self, llama: BlockStack, budget, keeps_outputs: bool) -> None:
        engine = Engine(llama, prefix_cache=PrefixCache())
        shared = torch.randn(1, 3 * PAGE_TOKENS, HIDDEN)
        first = Generation.open(engine, budget, keeps_outputs=keeps_outputs, seed=1)
        first.check(*run(engine, (first, first.step(0, hidden=shared, num_wanted=1))))
        used = budget.capacity_bytes - budget.tokens_left
        second = Generation.open(engine, budget, keeps_outputs=keeps_outputs, seed=2)
        prompt = torch.cat([shared, torch.randn(1, 5, HIDDEN)], 1)
        (output,) = run(engine, (second, second.step(0, hidden=prompt, num_wanted=1)))
        second.check(output, None if keeps_outputs else 5)
        taken = budget.capacity_bytes - budget.tokens_left - used
        assert taken <= second.session.layout.size_bytes(2 * PAGE_TOKENS)  # of its own
        for _ in range(3):
            advance(engine, [first, second], 1)
        engine.close(first.session)
        advance(engine, [second], 4)

    @pytest.mark.parametrize("keeps_outputs", [False, True])
    def test_outputs_of_every_block_are_computed_though_the_content_is_known(
        self, llama: BlockStack, budget, keeps_outputs: bool
    ) -> None:
        engine = Engine(llama, prefix_cache=PrefixCache())
        shared = torch.randn(1, 2 * PAGE_TOKENS, HIDDEN)
        for seed in (1, 2):
            generation = Generation.open(engine, budget, keeps_outputs=keeps_outputs, seed=seed)
            (outputs,) = run(engine, (generation, generation.step(0, hidden=shared, num_wanted=1, every_block=True)))
            assert len(outputs) == BLOCKS
            generation.check(outputs[-1])
            generation.check(engine.stateless.forward(Span(BLOCKS - 1, BLOCKS), BlockInput(outputs[-2])))

    def test_other_content_or_blocks_are_not_mistaken_for_it(self, llama: BlockStack, budget) -> None:
        engine = Engine(llama, prefix_cache=PrefixCache())
        shared = torch.randn(1, 2 * PAGE_TOKENS, HIDDEN)
        first = Generation.open(engine, budget)
        run(engine, (first, first.step(0, hidden=shared)))
        changed = shared.clone()
        changed[0, 3, 5] += 1
        for hidden, options in (
            (changed, {}),
            (shared, {"blocks": Span(0, 3)}),
            (shared, {"padded": 2}),
        ):
            other = Generation.open(engine, budget, **options)
            (output,) = run(engine, (other, other.step(0, hidden=hidden, num_wanted=1)))
            other.check(output, 1)
            advance(engine, [other], 1)

    def test_pages_of_others_survive_cropping_and_reordering(self, llama: BlockStack, budget) -> None:
        engine = Engine(llama, prefix_cache=PrefixCache())
        shared = torch.randn(1, 2 * PAGE_TOKENS, HIDDEN)
        first = Generation.open(engine, budget, reserved=4 * PAGE_TOKENS, seed=1)
        run(engine, (first, first.step(0, hidden=shared)))
        second = Generation.open(engine, budget, reserved=4 * PAGE_TOKENS, seed=2)
        second.check(
            *run(engine, (second, second.step(0, hidden=torch.cat([shared, shared], 1), num_wanted=1)))[0:1], 1
        )
        advance(engine, [first], 3, Crop(PAGE_TOKENS + 4))  # into a page that the second uses
        advance(engine, [second], 2, Crop(2 * PAGE_TOKENS + 1), Reorder((0, 0)))
        advance(engine, [first, second], 1)

    def test_kept_pages_go_when_room_is_needed(self, llama: BlockStack) -> None:
        engine = Engine(llama, prefix_cache=PrefixCache())
        room = engine.layout_of(HOSTED, False).size_bytes(4 * PAGE_TOKENS)
        budget = CacheBudget(room, 1)
        budget.reclaim_by(engine.prefix_cache.reclaim)
        for seed in range(4):
            generation = Generation.open(engine, budget, seed=seed)
            advance(engine, [generation], 3 * PAGE_TOKENS)
            engine.close(generation.session)
            assert budget.tokens_left == budget.capacity_bytes
        assert len(engine.prefix_cache) <= 4


def test_what_is_computed_counts_and_what_is_refused_or_shared_does_not(llama: BlockStack, budget) -> None:
    engine = Engine(llama, prefix_cache=PrefixCache())
    engine.counters = Counters()
    first, part = Generation.open(engine, budget), Generation.open(engine, budget, Span(0, 3), batch_size=2, seed=1)
    num_blocks, num_tokens = len(HOSTED), 2 * PAGE_TOKENS + 1
    advance(engine, [first], num_tokens)
    advance(engine, [part], 4)
    advance(engine, [first, part], 1)
    again = Generation.open(engine, budget)  # the same prompt
    run(engine, (again, again.step(num_tokens, num_wanted=1)))
    bad = torch.full((1, 1, HIDDEN), torch.nan)
    run(engine, (first, first.step(1, hidden=bad)))
    engine.stateless.counters = engine.counters  # from now on: what is expected came from there
    engine.stateless.forward(Span(1, 3), BlockInput(torch.zeros(5, 7, HIDDEN)))
    work = engine.counters.work()
    assert work.decoded == num_blocks + 2 * 3
    assert work.prompts == (num_tokens + 1) * num_blocks + 2 * 4 * 3  # 1: what the pages of the first do not have
    assert work.passes == 5 * 7 * 2
    assert work.uptime_s > 0


def test_each_block_counts_as_it_is_run(llama: BlockStack, budget) -> None:
    engine = Engine(llama)
    engine.counters = Counters()
    engine.stateless.forward(Span(1, 3), BlockInput(torch.zeros(5, 7, HIDDEN)))
    assert engine.counters.blocks_run == 2
    generation = Generation.open(engine, budget)
    run(engine, (generation, generation.step(4)))
    assert engine.counters.blocks_run >= 2 + len(HOSTED)  # what is expected comes from there, too


class TestNextPositions:
    @OF_KINDS
    def test_of_several_sessions_are_as_each_alone(self, engine: Engine, budget: CacheBudget) -> None:
        """With much room, a little, and none; at the very beginning; and beside a step of another kind."""
        roomy, tight, new, last, part = generations = [
            Generation.open(engine, budget, seed=seed, reserved=reserved, blocks=blocks)
            for seed, reserved, blocks in (
                (1, 9, HOSTED),
                (2, 6, HOSTED),
                (3, 0, HOSTED),
                (4, 9, HOSTED),
                (5, 9, Span(0, 1)),
            )
        ]
        for number, generation in enumerate((roomy, tight, last, part)):
            advance(engine, [generation], 4 + number)
        for _ in range(3):
            alone = last.step(1)
            results, output = engine.run([next_of(roomy, tight, new, part), (last.session, alone)])
            for generation, result in zip((roomy, tight, new, part, last), (*of_each(results), output), strict=True):
                generation.check(result)
        assert [generation.session.length for generation in generations] == [7, 8, 3, 9, 10]

    def test_are_one_tensor_if_all_have_room(self, llama: BlockStack, budget: CacheBudget) -> None:
        engine = Engine(llama)
        generations = [Generation.open(engine, budget, seed=seed, reserved=9, keeps_outputs=True) for seed in (1, 2)]
        advance(engine, generations, 3)
        (results,) = engine.run([next_of(*generations)])
        assert isinstance(results, torch.Tensor) and results.shape == (2, 1, HIDDEN)
        for generation, output in zip(generations, results.split(1), strict=True):
            generation.check(output)
            assert torch.equal(engine.outputs(generation.session, 3, 4), output)

    def test_that_are_refused_leave_the_others(self, llama: BlockStack, budget: CacheBudget) -> None:
        """Whose hidden states are no numbers, whose position does not follow, and whose session is closed."""
        engine = Engine(llama)
        good, bad, gap, closed, other = (Generation.open(engine, budget, seed=seed, reserved=9) for seed in range(5))
        advance(engine, [good, bad, gap, closed, other], 3)
        engine.close(closed.session)
        for spoilt in (False, True):
            positions = next_of(good, bad, gap, closed, other)
            positions.starts[2] += 1
            positions.hidden[1] += torch.inf if spoilt else 0.0
            (results,) = engine.run([positions])
            outputs = of_each(results)
            good.check(outputs[0]), other.check(outputs[4])
            assert [isinstance(output, RequestRejected) for output in outputs] == [False, spoilt, True, True, False]
        assert [each.session.length for each in (good, bad, gap, other)] == [5, 4, 3, 5]

    def test_of_a_crash_in_the_blocks_change_nothing(self, llama: BlockStack, budget: CacheBudget, monkeypatch) -> None:
        engine = Engine(llama)
        generations = [Generation.open(engine, budget, seed=seed, reserved=9) for seed in (1, 2)]
        advance(engine, generations, 3)
        before = [(generation.hidden, generation.mask) for generation in generations]

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_run_part", _fail)
            with pytest.raises(ZeroDivisionError):
                engine.run([next_of(*generations)])
        for generation, (hidden, mask) in zip(generations, before, strict=True):
            generation.hidden, generation.mask = hidden, mask
        (results,) = engine.run([next_of(*generations)])
        assert isinstance(results, torch.Tensor)  # the room was given back
        for generation, output in zip(generations, results.split(1), strict=True):
            generation.check(output)


class TestRefusals:
    def test_leave_a_session_as_it_was(self, llama: BlockStack) -> None:
        engine = Engine(llama)
        layout = engine.layout_of(HOSTED, False)
        budget = CacheBudget(layout.size_bytes(20), layout.size_bytes(1))
        generation = Generation.open(engine, budget, reserved=8)
        advance(engine, [generation], 6)
        before = generation.hidden, generation.mask
        for step, error in (
            (generation.step(30), PeerBusy),
            (SessionStep(9, BlockInput(torch.zeros(1, 1, HIDDEN))), RequestRejected),
            (SessionStep(6, BlockInput(torch.zeros(2, 1, HIDDEN))), RequestRejected),
            (SessionStep(6, BlockInput(torch.zeros(2, 1, HIDDEN)), (Reorder((0, 1)),)), RequestRejected),
            (SessionStep(4, BlockInput(torch.full((1, 1, HIDDEN), torch.nan))), RequestRejected),
        ):
            (output,) = engine.run([(generation.session, step)])
            assert isinstance(output, error), output
            generation.hidden, generation.mask = before
            assert generation.session.length == 6
        advance(engine, [generation], 1)

    def test_a_crash_in_the_blocks_changes_nothing(self, llama: BlockStack, budget, monkeypatch) -> None:
        engine = Engine(llama)
        generations = [Generation.open(engine, budget, reserved=9, seed=seed) for seed in (1, 2)]
        for generation in generations:
            advance(engine, [generation], 4)
        steps = [(generation, generation.step(1, Crop(3))) for generation in generations]
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_run_part", _fail)
            with pytest.raises(ZeroDivisionError):
                run(engine, *steps)
        for (generation, _), output in zip(steps, run(engine, *steps), strict=True):
            generation.check(output)


def _fail(*_args: object) -> None:
    raise ZeroDivisionError


class TestRoom:
    def test_speculation_fills_what_it_cropped(self, llama: BlockStack, budget) -> None:
        engine = Engine(llama)
        generation = Generation.open(engine, budget, reserved=40)
        advance(engine, [generation], 6)
        for _ in range(12):
            advance(engine, [generation], 4)
            advance(engine, [generation], 1, Crop(generation.session.length - 3))
        assert [len(parts) for parts in generation.session.state.rows[0].parts] == [1]
