"""Steps that are recorded once give what the blocks' own code gives, for every family; a tape stands for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.gpu.fp8_weight import Fp8Weight, Fp8WithExactInputs
from swarm_models.kernels.quantized_linear import QuantizedLinear, swapped_weights
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.blocks.split_stack import SplitStack
from swarm_server.engine.engine import Engine
from swarm_server.engine.ways import Ways, with_replays
from swarm_server.gpu.row_tables import LENGTH
from swarm_server.gpu.step_replays import StepReplays
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.prefix_cache import PrefixCache
from tests.families import FEW, UNLIKE
from tests.marks import always
from tests.unit.server.engine.test_engine import HOSTED, PLENTY, Generation, advance, run
from tests.unit.server.gpu.stand_ins import RawAttention, TapeRecorder
from tests.unit.server.graph.test_step_graph import CHECKED, WITH, Counted, counted_steps, talk
from tests.zoo import BLOCKS, SLIDING, save_checkpoint

TOLERANCE = 1e-5  # relative


def open_engine(stack: BlockStack | SplitStack, prefix_cache: PrefixCache | None = None) -> tuple[Engine, TapeRecorder]:
    engine, recorder = Engine(stack, prefix_cache=prefix_cache), TapeRecorder()
    engine.ways = Ways()
    engine.ways = with_replays(stack, engine.layout, engine._try_rows, RawAttention(recorder), recorder)
    return engine, recorder


# Those whose blocks are made like another's are tried with programs of the CPU, in tests/unit/server/graph.
@pytest.fixture(scope="module", params=always(*FEW, among=UNLIKE))
def name(request) -> str:
    return request.param


def test_steps_are_graphs_and_right_or_say_why_not(name: str, stack_of: Callable[[str], BlockStack]) -> None:
    engine, recorder = open_engine(stack_of(name))
    assert (engine.ways.graphs is not None) == (name in WITH), engine.ways.refusal
    assert (engine.ways.graphs is None) == bool(engine.ways.refusal)
    if engine.ways.graphs is None:
        return
    counted = counted_steps(engine)
    ours = talk(engine, checked=name in CHECKED)
    assert counted.steps > SLIDING and recorder.num_recorded < counted.steps
    engine.ways = Ways()
    theirs = talk(engine)
    for output, expected in zip(ours, theirs, strict=True):
        assert (output - expected).abs().max() <= TOLERANCE * expected.abs().max()


def one_step_of(engine: Engine, num_rows: int) -> None:
    generation = Generation.open(engine, CacheBudget(PLENTY, 1), batch_size=num_rows, seed=num_rows, shares=False)
    for num_new in (4, 1):
        (output,) = run(engine, (generation, generation.step(num_new)))
        generation.check(output, num_new)


def test_a_graph_is_for_as_many_rows_or_fewer(llama: BlockStack) -> None:
    engine, recorder = open_engine(llama)
    before = recorder.num_recorded
    for num_rows in (5, 8, 6, 7):  # prompts of 4 are rows, too
        one_step_of(engine, num_rows)
    assert recorder.num_recorded == before + 2  # 8 and 32


def test_parts_of_the_span_have_graphs_once_they_are_asked_for_often(llama: BlockStack) -> None:
    engine, recorder = open_engine(llama)
    generation = Generation.open(engine, CacheBudget(PLENTY, 1), Span(1, 3), shares=False)
    before, recorded = recorder.num_recorded, []
    for _ in range(5):
        (output,) = run(engine, (generation, generation.step(1)))
        generation.check(output)
        recorded.append(recorder.num_recorded - before)
    assert recorded == [0, 0, 1, 1, 1]


def test_long_prompts_are_computed_by_the_code(llama: BlockStack) -> None:
    engine, _ = open_engine(llama)
    counted = counted_steps(engine)
    generation = Generation.open(engine, CacheBudget(PLENTY, 1), shares=False)
    for num_new, num_graphs in ((17, 0), (16, 1)):
        (output,) = run(engine, (generation, generation.step(num_new)))
        generation.check(output, num_new)
        assert counted.steps == num_graphs


def test_blocks_on_several_devices_are_graphs_of_each(tmp_path) -> None:
    save_checkpoint("llama", tmp_path)
    checkpoint = ModelCheckpoint.open(tmp_path)
    parts = Span(0, 2), Span(2, BLOCKS)
    engine, recorder = open_engine(SplitStack([load_blocks(checkpoint, part) for part in parts]))
    assert engine.ways.graphs is not None
    before = recorder.num_recorded
    one_step_of(engine, 3)
    assert recorder.num_recorded > before


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_padding_is_left_out_and_so_is_what_a_window_hides(name: str, stack_of: Callable[[str], BlockStack]) -> None:
    engine, _ = open_engine(stack_of(name))
    counted = counted_steps(engine)
    budget = CacheBudget(PLENTY, 1)
    padded = Generation.open(engine, budget, batch_size=2, padded=2, seed=1)
    plain = Generation.open(engine, budget, seed=2)
    for generation in (padded, plain):
        run(engine, (generation, generation.step(5)))
    before = counted.steps
    for _ in range(SLIDING):
        advance(engine, [padded, plain], 1)
    assert counted.steps == before + SLIDING


def test_pages_that_others_have_left_are_read_where_they_are_now(llama: BlockStack) -> None:
    """They are cut to what is filled when their session ends, and lie elsewhere then."""
    engine, _ = open_engine(llama, PrefixCache())
    counted = counted_steps(engine)
    budget = CacheBudget(PLENTY, 1)
    first = Generation.open(engine, budget, seed=5, reserved=4 * PAGE_TOKENS, owner="somebody")
    advance(engine, [first], PAGE_TOKENS + 3)
    second = Generation.open(engine, budget, seed=5, owner="somebody")
    prompt = first.hidden[:, : PAGE_TOKENS + 3]
    run(engine, (second, second.step(len(prompt[0]), hidden=prompt, num_wanted=1)))
    assert engine.counters.positions["reused"] == PAGE_TOKENS
    advance(engine, [first, second], 1)
    engine.close(first.session)
    before = counted.steps
    for _ in range(3):
        advance(engine, [second], 1)
    assert counted.steps == before + 3


class Failing(TapeRecorder):
    def record(self, device, compute):
        raise RuntimeError("operation not permitted when stream is capturing")


class Wrong(RawAttention):
    def attend(self, *args):
        return super().attend(*args).neg_()


def test_what_cannot_be_recorded_is_computed_by_the_code(llama: BlockStack) -> None:
    engine, recorder = Engine(llama), Failing()
    engine.ways = Ways()
    ways = with_replays(llama, engine.layout, engine._try_rows, RawAttention(recorder), recorder)
    assert ways.graphs is None and "RuntimeError: operation not permitted" in ways.refusal


def test_what_fails_later_is_computed_by_the_code_from_then_on(llama: BlockStack, caplog) -> None:
    engine, recorder = open_engine(llama)
    replays = engine.ways.graphs
    assert isinstance(replays, StepReplays)
    caplog.set_level("INFO")
    replays._recorder = Failing()
    for _ in range(2):
        one_step_of(engine, 20)
    assert caplog.text.count("no graph for 32 rows of blocks 0:") == 1
    assert "RuntimeError: operation not permitted" in caplog.text
    replays._recorder = recorder
    counted = Counted(replays)
    engine.ways = replace(engine.ways, graphs=counted)
    one_step_of(engine, 1)
    assert counted.steps == 2


def test_graphs_that_give_something_else_are_not_used(llama: BlockStack) -> None:
    engine, recorder = Engine(llama), TapeRecorder()
    engine.ways = Ways()
    ways = with_replays(llama, engine.layout, engine._try_rows, Wrong(recorder), recorder)
    assert ways.graphs is None and ways.refusal == "the attention kernel gives other outputs than torch on cpu"


class WrongWithFew(RawAttention):
    def attend(self, table, query, *args):
        output = super().attend(table, query, *args)
        return output.neg_() if int(table[..., LENGTH].max()) < 100 else output


def test_attention_that_is_right_in_its_trial_alone_is_not_used(llama: BlockStack) -> None:
    engine, recorder = Engine(llama), TapeRecorder()
    engine.ways = Ways()
    ways = with_replays(llama, engine.layout, engine._try_rows, WrongWithFew(recorder), recorder)
    assert ways.graphs is None and ways.refusal == "a graph gives other outputs than the blocks"


class Later(TapeRecorder):
    """Takes the positions of steps of two rows, as the trial's second step is, for those after them."""

    def record(self, device, compute):
        play, replay = super().record(device, compute), compute.__self__

        def shifted() -> None:
            replay._positions += replay.num_rows == 2
            play()

        return shifted


def in_fp8(directory) -> BlockStack:
    def transform(block: nn.Module, _index: int) -> None:
        quantize_(block, "fp8", torch.device("cpu"), torch.float32, emulated=True)

    save_checkpoint("llama", directory, initializer_range=0.1)
    return load_blocks(ModelCheckpoint.open(directory), HOSTED, transform=transform)


@pytest.mark.parametrize("recorder", [TapeRecorder(), Later()], ids=["right", "later"])
def test_graphs_of_blocks_in_fp8_are_tried_with_exact_inputs(recorder: TapeRecorder, tmp_path) -> None:
    """Their inputs are rounded to four bits, so that what is right differs nearly as much as what is wrong."""
    stack = in_fp8(tmp_path)
    layers = [module for module in stack.modules() if isinstance(module, QuantizedLinear)]
    weights = [layer.quantized for layer in layers]
    engine = Engine(stack)
    engine.ways = Ways()
    ways = with_replays(stack, engine.layout, engine._try_rows, RawAttention(recorder), recorder)
    assert {type(weight) for weight in weights} == {Fp8Weight}
    assert all(layer.quantized is weight for layer, weight in zip(layers, weights, strict=True))
    if type(recorder) is Later:
        assert ways.graphs is None and ways.refusal == "a graph gives other outputs than the blocks"
        return
    assert ways.graphs is not None, ways.refusal
    outputs, expected = engine._try_rows(ways), engine._try_rows(Ways())
    with swapped_weights(layers, Fp8WithExactInputs):
        of_trial = engine._try_rows(Ways())
    assert (outputs - expected).norm() < 0.1 * (outputs - of_trial).norm(), "graphs multiply by weights of the trial"


@pytest.mark.cuda
@pytest.mark.parametrize("parts", [[HOSTED], [Span(0, 2), Span(2, BLOCKS)]], ids=["whole", "parts"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3_text"])
def test_steps_are_graphs_on_cuda(name: str, parts: list[Span], tmp_path) -> None:
    save_checkpoint(name, tmp_path)
    stacks = [load_blocks(ModelCheckpoint.open(tmp_path), part, device="cuda") for part in parts]
    engine = Engine(stacks[0] if len(stacks) == 1 else SplitStack(stacks))
    assert engine.ways.graphs is not None, engine.ways.refusal
    counted = counted_steps(engine)
    talk(engine, checked=True)
    assert counted.steps > SLIDING
