"""Decode steps as programs give what the blocks' own code gives, for every family that has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.kernels.kernel_weight import KernelWeight
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, Reorder
from swarm_server.graph import adapter_slots, step_graph
from swarm_server.graph.adapter_slots import STEPS_TO_PAY
from swarm_server.graph.capturing import capture
from swarm_server.graph.recording import NotCapturable
from swarm_server.graph.step_graph import StepGraphs
from swarm_server.kv.kv_cache import CacheBudget
from tests.marks import always
from tests.unit.server.engine.test_engine import HOSTED, PLENTY, Generation, run
from tests.zoo import BLOCKS, HEADS, HIDDEN, KV_HEADS, SLIDING, SUPPORTED, save_checkpoint

pytestmark = pytest.mark.skipif(not KernelWeight.is_available(), reason="no compiled kernel")

# The others have experts, recurrent states, positions of their own, or attention that is more than scaled dot products.
WITH = {
    *("llama", "mistral-sliding", "gpt2", "gpt_bigcode", "gpt_neox", "qwen2", "qwen2-sliding", "qwen3", "gemma"),
    *("gemma3_text", "phi", "phi3", "olmo2", "olmo3", "stablelm", "starcoder2", "cohere", "cohere2", "glm", "glm4"),
    *("granite", "smollm3", "nemotron", "exaone4", "nanochat", "opt", "opt-projected", "gemma4_unified_text"),
}

# What the code gives is right as far as tests of the engine go: here it is compared with passes without a cache, too.
CHECKED = ("llama", "mistral-sliding", "gemma3_text")
# Relative. Sums in another order differ by 1e-7, which now and then decides how an activation is rounded to 14 bits: at
# which positions depends on the processor. Mistakes are of order 1.
UNLESS_ROUNDED, ALL = 2e-6, 2e-2


def load_int8(directory, mlp: nn.Module | None = None) -> BlockStack:
    """Load blocks in int8, with this in the place of each MLP if it is given."""

    def transform(block: nn.Module, _index: int) -> None:
        quantize_(block, "int8", torch.device("cpu"), torch.float32, int8_weight=KernelWeight)
        if mlp is not None and hasattr(block, "mlp"):
            block.mlp = mlp

    return load_blocks(ModelCheckpoint.open(directory), HOSTED, transform=transform)


class Counted:
    """Graphs, and how many steps they have computed."""

    def __init__(self, graphs: StepGraphs) -> None:
        self.graphs = graphs
        self.steps = 0

    def run(self, *arguments):
        output = self.graphs.run(*arguments)
        self.steps += output is not None
        return output


def counted_steps(engine: Engine) -> Counted:
    """Count the steps that the engine computes by graphs from now on."""
    counted = Counted(engine.ways.graphs)
    engine.ways = replace(engine.ways, graphs=counted)
    return counted


@pytest.fixture(scope="module", params=always(*CHECKED, "gpt2", "phi", "mixtral", "lfm2", among=SUPPORTED))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def stack(name: str, tmp_path_factory) -> BlockStack:
    directory = tmp_path_factory.mktemp(name)
    save_checkpoint(name, directory)
    return load_int8(directory)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> BlockStack:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", directory)
    return load_int8(directory)


def everyone(engine: Engine) -> list[Generation]:
    budget = CacheBudget(PLENTY, 1)
    return [
        Generation.open(engine, budget, seed=1, shares=False),
        Generation.open(engine, budget, batch_size=3, seed=2, shares=False),
        Generation.open(engine, budget, Span(2, BLOCKS), seed=3, shares=False),
        Generation.open(engine, budget, Span(0, 3), batch_size=2, seed=4, shares=False),
    ]


def talk(engine: Engine, *, checked: bool = False) -> list[torch.Tensor]:
    """Prompts of several lengths, beyond windows too, and then steps of all, in which rows leave and change places."""
    generations, outputs = everyone(engine), []
    for generation, num_tokens in zip(generations, (5, 4, SLIDING + 3, 1), strict=True):
        outputs += run(engine, (generation, generation.step(num_tokens)))
    for number in range(SLIDING + 2):
        changes = [()] * len(generations)
        if number == 3:
            changes[1] = (Reorder((2, 0, 0, 1)),)
        if number == 5:
            changes[0] = (Crop(generations[0].hidden.shape[1] - 2),)
        if number == 6:
            generations = generations[:3]
        num_new = 3 if number % 4 == 2 else 1
        steps = [(one, one.step(num_new, *change)) for one, change in zip(generations, changes, strict=False)]
        for (generation, _), output in zip(steps, run(engine, *steps), strict=True):
            assert isinstance(output, torch.Tensor), output
            outputs.append(output)
            if checked:
                expected = generation.expected()[:, -num_new:]
                assert (output - expected).abs().max() <= ALL * expected.abs().max()
    return outputs


def test_steps_are_programs_that_give_what_the_code_gives_or_say_why_not(name: str, stack: BlockStack) -> None:
    engine = Engine(stack)
    assert (engine.ways.graphs is not None) == (name in WITH), engine.ways.refusal
    assert (engine.ways.graphs is None) == bool(engine.ways.refusal)
    if engine.ways.graphs is None:
        return
    counted = counted_steps(engine)
    ours = talk(engine, checked=name in CHECKED)
    assert counted.steps > SLIDING
    engine.ways = replace(engine.ways, graphs=None)
    theirs = talk(engine)
    of_positions = [(a - b).abs().amax(-1) / b.abs().max() for a, b in zip(ours, theirs, strict=True)]
    errors: list[float] = torch.cat([of_output.flatten() for of_output in of_positions]).tolist()
    assert min(errors) <= UNLESS_ROUNDED and max(errors) <= ALL


def test_rows_do_not_depend_on_their_mates(llama: BlockStack) -> None:
    engine = Engine(llama)
    counted = counted_steps(engine)
    budget = CacheBudget(PLENTY, 1)
    alone, among = (Generation.open(engine, budget, seed=7, shares=False) for _ in range(2))
    others = [Generation.open(engine, budget, seed=seed, shares=False) for seed in range(20)]
    for number, other in enumerate(others):
        run(engine, (other, other.step(number + 2)))
    for generation in (alone, among):
        run(engine, (generation, generation.step(6)))
    for count in (1, 4, 20):
        (expected,) = run(engine, (alone, alone.step(1)))
        mates = [(other, other.step(1)) for other in others[:count]]
        outputs = run(engine, *mates, (among, among.step(1)))
        assert torch.equal(outputs[-1], expected)
    assert counted.steps == len(others) + 2 + 6


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_padding_is_left_out(name: str, tmp_path) -> None:
    save_checkpoint(name, tmp_path)
    engine = Engine(load_int8(tmp_path))
    counted = counted_steps(engine)
    budget = CacheBudget(PLENTY, 1)
    padded = Generation.open(engine, budget, batch_size=2, padded=2, seed=1)
    plain = Generation.open(engine, budget, seed=2)
    for generation in (padded, plain):
        run(engine, (generation, generation.step(5)))
    for _ in range(SLIDING):
        outputs = run(engine, *((one, one.step(1)) for one in (padded, plain)))
        for generation, output in zip((padded, plain), outputs, strict=True):
            assert (output - generation.expected()[:, -1:]).abs().max() <= ALL * output.abs().max()
    assert counted.steps == 1 + SLIDING  # the prompt of one, and the steps of both


@pytest.mark.parametrize(("name", "num_rows"), [("llama", 1), ("mistral-sliding", 3), ("gemma3_text", 3)])
def test_several_positions_are_bitwise_those_of_one_after_the_other(name: str, num_rows: int, tmp_path) -> None:
    save_checkpoint(name, tmp_path)
    engine = Engine(load_int8(tmp_path))
    counted = counted_steps(engine)
    budget = CacheBudget(PLENTY, 1)
    together, single, mate = (
        Generation.open(engine, budget, batch_size=rows, seed=seed, shares=False)
        for rows, seed in ((num_rows, 1), (num_rows, 1), (2, 3))
    )
    for generation in (together, single, mate):
        run(engine, (generation, generation.step(4)))
    num_before, steps = counted.steps, 0
    for num_new in (2, SLIDING + 1, 5, 1, SLIDING + 3):
        output, _ = run(engine, (together, together.step(num_new)), (mate, mate.step(num_new)))
        hidden = together.hidden[:, -num_new:].split(1, 1)
        one_by_one = [run(engine, (single, single.step(1, hidden=one)))[0] for one in hidden]
        assert torch.equal(output, torch.cat(one_by_one, 1))
        steps += 1 + num_new
    assert counted.steps == num_before + steps


def test_holes_and_padding_among_the_new_are_left_to_the_code(llama: BlockStack) -> None:
    engine = Engine(llama)
    counted = counted_steps(engine)
    budget = CacheBudget(PLENTY, 1)
    holes, padded = (Generation.open(engine, budget, seed=1, padded=padding, shares=False) for padding in (0, 4))
    run(engine, (padded, padded.step(5)))
    assert counted.steps == 0
    run(engine, (holes, holes.step(5)))
    assert counted.steps == 1
    holes.mask[0, 2] = 0
    run(engine, (holes, holes.step(1)))
    assert counted.steps == 1
    run(engine, (padded, padded.step(1)))
    assert counted.steps == 2


def test_weights_of_another_kind_have_no_programs(stack_of: Callable[[str], BlockStack]) -> None:
    assert Engine(stack_of("llama")).ways.refusal == "products are not the kernel's"


NUM_TURNS = STEPS_TO_PAY // 2 + 1  # of two steps each


def adapter_of(rank: int, *, seed: int) -> Adapter:
    """Beside every query and value projection."""
    generator = torch.Generator().manual_seed(seed)

    def part(block: int, module: str, size: int) -> LowRank:
        a, b = torch.randn(rank, HIDDEN, generator=generator), torch.randn(size, rank, generator=generator)
        return LowRank(block, module, 0.5, a / 8, b / 8)

    projections = ("self_attn.q_proj", HIDDEN), ("self_attn.v_proj", HIDDEN // HEADS * KV_HEADS)
    return Adapter(b"0123456789abcdef", tuple(part(block, *each) for block in HOSTED for each in projections))


def test_adapters_of_one_layout_take_turns_in_the_same_programs(llama: BlockStack) -> None:
    engine = Engine(llama)
    counted = Counted(engine.ways.graphs)
    with_and_without = replace(engine.ways, graphs=counted), replace(engine.ways, graphs=None)
    adapters = [adapter_of(4, seed=1), adapter_of(4, seed=2), adapter_of(3, seed=3)]
    placed = [engine.place(bytes([number]), adapter) for number, adapter in enumerate(adapters)]
    rare = [engine.place(bytes([rank]), adapter_of(rank, seed=4)) for rank in range(5, 9)]

    def outputs() -> list[torch.Tensor]:
        budget = CacheBudget(PLENTY, 1)
        *often, _ = everyone = [
            Generation.open(engine, budget, batch_size=2, seed=seed, adapter=adapter, shares=False)
            for seed, adapter in enumerate((*placed, None))
        ]
        others = [Generation.open(engine, budget, adapter=adapter, shares=False) for adapter in rare]
        steps = [[each] for each in everyone for _ in range(2)] * NUM_TURNS
        steps += [everyone, *([each] for each in (*others, *often))]
        return [output for together in steps for output in run(engine, *((each, each.step(1)) for each in together))]

    results = []
    for engine.ways in with_and_without:
        results.append(outputs())
    before = STEPS_TO_PAY // 4  # turns until the second adapter has the slot; then each has it for one step of a turn
    # In the end, the second and the third adapter still have a slot.
    assert counted.steps == (1 + 2 * (NUM_TURNS - before)) + (2 * NUM_TURNS - STEPS_TO_PAY + 1) + 2 * NUM_TURNS + 2
    assert len(counted.graphs._captured) == 3  # two layouts, and no adapter; the rare layouts have no programs
    assert not torch.allclose(results[1][0], results[1][1], rtol=0.1)  # the adapters matter
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= ALL * theirs.abs().max()


def test_captures_of_parts_of_the_span_take_limited_memory(llama: BlockStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph, "_MOST_CAPTURES", 3)
    monkeypatch.setattr(adapter_slots, "STEPS_TO_PAY", 1)
    engine, budget = Engine(llama), CacheBudget(PLENTY, 1)
    counted = counted_steps(engine)
    spans = [Span(start, end) for start in range(BLOCKS) for end in range(start + 1, BLOCKS + 1)]
    assert len(spans) > 4
    everyone = [Generation.open(engine, budget, span, seed=number, shares=False) for number, span in enumerate(spans)]
    whole = everyone[spans.index(HOSTED)]
    for _ in range(2):  # the second time, what was dropped is made again
        for each in everyone:
            for generation in (whole, each):
                (output,) = run(engine, (generation, generation.step(1)))
                expected = generation.expected()[:, -1:]
                assert (output - expected).abs().max() <= ALL * expected.abs().max()
            kept = list(counted.graphs._captured)
            assert len(kept) <= 3 and (HOSTED, None) in kept  # what others use stays
            assert {place[:2] for place in counted.graphs._assembled} <= set(kept)
    assert counted.steps == 4 * len(spans)


def test_a_part_takes_the_place_of_another_once_its_programs_pay(
    llama: BlockStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that takes turns with very many parts would have the server capture one at each step."""
    monkeypatch.setattr(step_graph, "_MOST_CAPTURES", 2)
    engine, budget = Engine(llama), CacheBudget(PLENTY, 1)
    counted = counted_steps(engine)
    first, second = (
        Generation.open(engine, budget, span, seed=span.start, shares=False) for span in (Span(0, 2), Span(1, 3))
    )
    run(engine, (first, first.step(1)))
    for _ in range(STEPS_TO_PAY - 1):
        run(engine, (second, second.step(1)))
    assert counted.steps == 1 and list(counted.graphs._captured) == [(HOSTED, None), (Span(0, 2), None)]
    run(engine, (second, second.step(1)))
    assert counted.steps == 2 and list(counted.graphs._captured) == [(Span(0, 2), None), (Span(1, 3), None)]


class Looks(nn.Module):
    """Stands in for a block's MLP, and decides by values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Sorts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(-1).values


@pytest.mark.parametrize(("mlp", "reason"), [(Looks(), "looks at values"), (Sorts(), "no instruction for aten.sort")])
def test_what_cannot_be_captured_is_refused(tmp_path, mlp: nn.Module, reason: str) -> None:
    save_checkpoint("llama", tmp_path)
    stack = load_int8(tmp_path, mlp)
    with pytest.raises(NotCapturable, match=reason):
        capture(stack, 2, 100)
    assert reason in Engine(stack).ways.refusal


class Remembers(nn.Module):
    """Depends on how many positions there are, which nobody tells a program."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from swarm_server.kv import rows_cache

        return x * rows_cache._running.get().get_seq_length()


def test_what_depends_on_the_length_is_refused(tmp_path) -> None:
    save_checkpoint("llama", tmp_path)
    graphs = StepGraphs(load_int8(tmp_path, Remembers()), 0)
    assert graphs.refusal is not None and "how many positions" in graphs.refusal
