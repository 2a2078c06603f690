"""One engine over several devices computes, bit for bit, what one device computes; each tensor is where it belongs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.quantization import quantize_
from swarm_protocol.span import Span
from swarm_protocol.wire.adapters import Adapter, LowRank, Prompt
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.adapters.dropout import Dropout
from swarm_server.blocks.blocks import load_blocks
from swarm_server.blocks.split_stack import SplitStack
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, RecordPast, Reorder, SessionStep
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.prefix_cache import PrefixCache
from tests.marks import LONG, SLOW
from tests.simulated_devices import FIRST, SECOND, SimulatedDevices
from tests.unit.server.engine.test_engine import HOSTED, OF_STATES, PLENTY, Generation, advance
from tests.zoo import ALIKE, BLOCKS, HIDDEN, SLIDING, SUPPORTED, save_checkpoint

CPU = torch.device("cpu")
PARTS = (Span(0, 2), Span(2, 3), Span(3, BLOCKS))
PLACEMENTS = {"cpu": (CPU, CPU, CPU), "accelerators": (FIRST, SECOND, FIRST)}
EVERYWHERE = (*PLACEMENTS, "cuda")
OFTEN = (("mistral-sliding", "cpu"), ("lfm2", "accelerators"))
KINDS = ("mistral-sliding", "lfm2", "deepseek_v3", "qwen3_next", "falcon_h1")  # no two keep the same


def combined(names: Iterable[str], placements: Iterable[str] = EVERYWHERE) -> list[Any]:
    """Return each family with each placement as one parameter; those whose blocks are made like another's are long."""
    marks = {"cuda": (pytest.mark.cuda,)}
    tiers = {(name, placement): (LONG,) for name in ALIKE for placement in placements} | dict.fromkeys(OFTEN, ())
    return [
        pytest.param(name, placement, marks=(*marks.get(placement, ()), *tiers.get((name, placement), (SLOW,))))
        for name in names
        for placement in placements
    ]


@pytest.fixture(params=[*PLACEMENTS, pytest.param("cuda", marks=pytest.mark.cuda)])
def devices(request) -> Iterator[tuple[torch.device, ...]]:
    if request.param == "cuda":
        first, last = torch.device("cuda", 0), torch.device("cuda", torch.cuda.device_count() - 1)
        yield first, last, first
        return
    with nullcontext() if request.param == "cpu" else SimulatedDevices():
        yield PLACEMENTS[request.param]


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(request.param, path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint("llama", path)
    return path


def split(directory: Path, devices: tuple[torch.device, ...], **options) -> SplitStack:
    checkpoint = ModelCheckpoint.open(directory)
    return SplitStack(
        [load_blocks(checkpoint, part, device=device, **options) for part, device in zip(PARTS, devices, strict=True)]
    )


def engines(directory: Path, devices: tuple[torch.device, ...], **options) -> tuple[Engine, Engine]:
    """On one of the devices, and over all; no programs and no graphs, which round otherwise."""
    stacks = (
        load_blocks(ModelCheckpoint.open(directory), HOSTED, device=devices[0], **options),
        split(directory, devices, **options),
    )
    whole, parts = (Engine(stack, prefix_cache=PrefixCache()) for stack in stacks)
    for engine in (whole, parts):
        engine.ways = replace(engine.ways, graphs=None)
    return whole, parts


def make_adapter(*, dropout: float = 0.0) -> Adapter:
    generator = torch.Generator().manual_seed(1)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / 8

    low_rank = [
        LowRank(block, "self_attn.q_proj", 0.5, matrix(2, HIDDEN), matrix(HIDDEN, 2), dropout)
        for block in range(BLOCKS)
    ]
    prompts = [Prompt(block, matrix(3, HIDDEN)) for block in (0, 2, 4)]
    return Adapter(b"0123456789abcdef", tuple(low_rank), tuple(prompts))


def same(*results: list[torch.Tensor]) -> None:
    for found, expected in zip(*results, strict=True):
        assert found.device.type == "cpu" and type(found) is torch.Tensor
        assert torch.equal(found, expected)


def generated(engine: Engine, num_rounds: int = 4) -> list[torch.Tensor]:
    """Of sessions over different blocks, of different lengths and batches, all that they are answered.

    After four rounds, each a step of all, the first session is longer than a window; one is so from its prompt on.
    """
    budget = CacheBudget(PLENTY, 1)
    everyone = [
        Generation.open(engine, budget, seed=1, keeps_outputs=True),
        Generation.open(engine, budget, batch_size=3, padded=2, seed=2),
        Generation.open(engine, budget, Span(2, BLOCKS), seed=3),
        Generation.open(engine, budget, Span(0, 2), seed=4),
        Generation.open(engine, budget, Span(1, 5), seed=5),
    ]
    outputs = []

    def run(*steps: tuple[Generation, SessionStep]) -> None:
        for output in engine.run([(generation.session, step) for generation, step in steps]):
            assert isinstance(output, torch.Tensor), output
            outputs.append(output)

    for generation, num_tokens in zip(everyone, (5, 4, SLIDING + 3, 1, 2), strict=True):
        run((generation, generation.step(num_tokens)))
    batches = [everyone] if engine.mixes_rows else [[generation] for generation in everyone]
    for _ in range(num_rounds):
        for batch in batches:
            run(*((generation, generation.step(1)) for generation in batch))
    first, beams, last = everyone[0], everyone[1], everyone[4]
    run((last, last.step(1, every_block=True)))
    run((beams, beams.step(1, Reorder((2, 0)))))
    run((first, first.step(1, RecordPast())))
    if first.session.layout.crops_states:
        run((first, first.step(2, Crop(first.session.length - 1))))
    outputs.append(engine.outputs(first.session, 0, first.session.length).cpu())
    for generation in everyone:
        engine.close(generation.session)
    assert budget.bytes_left == PLENTY
    return outputs


@pytest.mark.parametrize(("directory", "devices"), combined(KINDS[:2]), indirect=True)
def test_sessions(directory: Path, devices) -> None:
    whole, parts = engines(directory, devices)
    same(generated(parts), generated(whole))


# What is placed does not depend on the family; its own code makes masks, positions and states.
@pytest.mark.parametrize(
    ("directory", "devices"),
    combined([name for name in SUPPORTED if name not in KINDS[:2]], EVERYWHERE[1:]),
    indirect=True,
)
def test_every_family_on_accelerators(directory: Path, devices) -> None:
    """No tensor stays on the CPU or on another accelerator; the outputs are those of one engine on the CPU."""
    found = generated(Engine(split(directory, devices)), num_rounds=1)
    engine = Engine(load_blocks(ModelCheckpoint.open(directory), HOSTED))
    engine.ways = replace(engine.ways, graphs=None)
    for output, expected in zip(found, generated(engine, num_rounds=1), strict=True):
        assert (output - expected).abs().max() <= OF_STATES * expected.abs().max()


def test_keys_and_values_are_where_their_block_is(llama: Path) -> None:
    with SimulatedDevices():
        _, engine = engines(llama, PLACEMENTS["accelerators"])
        generation = Generation.open(engine, CacheBudget(PLENTY, 1), Span(1, 5), keeps_outputs=True)
        advance(engine, [generation], 3)
        layout = generation.session.layout
        (part,) = generation.session.state.rows[0].parts[0]
        found = [part.page.data[place.keys].device for place in layout.blocks]
        assert found == [FIRST, SECOND, FIRST, FIRST]
        assert part.page.data[-1].device == FIRST  # the outputs of block 4
        by_device = engine.layout.token_bytes_by_device()
        assert sum(by_device.values()) == engine.layout.token_bytes
        assert by_device[FIRST] > 5 * by_device[SECOND]  # the outputs too


def test_a_prefix_that_is_known(llama: Path, devices) -> None:
    results = []
    for engine in engines(llama, devices):
        budget, outputs = CacheBudget(PLENTY, 1), []
        prompt = torch.randn(1, 2 * PAGE_TOKENS + 3, HIDDEN, generator=torch.Generator().manual_seed(0))
        for seed in range(2):
            generation = Generation.open(engine, budget, seed=seed)
            step = generation.step(0, hidden=prompt, num_wanted=1)
            outputs += engine.run([(generation.session, step)])
            advance(engine, [generation], 1)
        assert engine.counters.positions["reused"] == 2 * PAGE_TOKENS
        results.append(outputs)
    same(*results)


@pytest.mark.parametrize(("directory", "devices"), combined(KINDS), indirect=True)
def test_a_session_moves_between_servers_with_one_device_and_with_several(directory: Path, devices) -> None:
    budget = CacheBudget(PLENTY, 1)
    for source, target in (engines(directory, devices), reversed(engines(directory, devices))):
        original = Generation.open(source, budget, batch_size=2, keeps_outputs=True)
        advance(source, [original], SLIDING + 5)
        stored = source.stored(original.session, 0, original.session.length)
        copy = target.open(HOSTED, 2, budget.lease("copy"), keeps_outputs=True)
        target.adopt(copy, 0, (), stored)
        again = target.stored(copy, 0, copy.length)
        assert stored.data.device == CPU and torch.equal(again.data, stored.data)
        step = original.step(1)
        same(target.run([(copy, step)]), source.run([(original.session, step)]))


def test_sessions_with_an_adapter(llama: Path, devices) -> None:
    results = []
    for engine in engines(llama, devices):
        placed, budget = engine.place(b"key", make_adapter()), CacheBudget(PLENTY, 1)
        everyone = [
            Generation.open(engine, budget, seed=1, adapter=placed),
            Generation.open(engine, budget, seed=2),
            Generation.open(engine, budget, Span(1, 5), seed=3, adapter=placed),
        ]
        outputs = []
        for num_tokens in (2, 1, 1):
            outputs += engine.run([(each.session, each.step(num_tokens)) for each in everyone])
        results.append(outputs)
    same(*results)


def test_adapters_are_where_their_block_is(llama: Path) -> None:
    with SimulatedDevices():
        _, engine = engines(llama, PLACEMENTS["accelerators"])
        adapter = engine.place(b"key", make_adapter()).adapter
        expected = [FIRST, FIRST, SECOND, FIRST, FIRST, FIRST]
        assert [part.a.device for part in adapter.low_rank] == expected
        assert [part.b.device for part in adapter.low_rank] == expected
        assert [prompt.values.device for prompt in adapter.prompts] == [FIRST, SECOND, FIRST]


def test_gradients(llama: Path, devices) -> None:
    results = []
    for engine in engines(llama, devices):
        generator = torch.Generator().manual_seed(2)
        hidden, grad = (torch.randn(2, 5, HIDDEN, generator=generator) for _ in range(2))
        mask = torch.ones(2, 5, dtype=torch.long)
        mask[0, :2] = 0
        placed = engine.place(b"key", make_adapter(dropout=0.25))
        found = []
        for span in (HOSTED, Span(1, 3), Span(3, 5)):
            inputs = BlockInput(hidden.clone(), mask)
            found.append(engine.stateless.forward(span, inputs, placed, Dropout(3)))
            found += engine.stateless.backward(span, inputs, grad, placed, Dropout(3), trains_adapter=True)
        output, recorded = engine.stateless.record(HOSTED, BlockInput(hidden.clone()), placed, max_bytes=PLENTY)
        assert recorded is not None and recorded.size_bytes > 0
        found += [output, *recorded.backward(grad)]
        results.append(found)
    same(*results)


def test_a_pass_that_is_kept_takes_as_much_as_on_one_device(llama: Path) -> None:
    sizes = []
    for engine in engines(llama, PLACEMENTS["cpu"]):
        _, recorded = engine.stateless.record(HOSTED, BlockInput(torch.ones(1, 9, HIDDEN)), max_bytes=PLENTY)
        assert recorded is not None
        sizes.append(recorded.size_bytes)
    assert 0.8 < sizes[1] / sizes[0] < 1.5  # each device has its own mask and rotary embeddings


def test_int8_on_parts(llama: Path) -> None:
    def prepare(block: torch.nn.Module, _index: int) -> None:
        quantize_(block, "int8", CPU, torch.float32)

    whole, parts = engines(llama, PLACEMENTS["cpu"], transform=prepare)
    same(generated(parts), generated(whole))
    assert len(parts.int8_weights) == len(whole.int8_weights) > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("method", ["none", "bnb-int8"])
def test_bfloat16_and_bitsandbytes(llama: Path, device: str, method: str) -> None:
    def prepare(block: torch.nn.Module, _index: int) -> None:
        quantize_(block, method, torch.device(device), torch.bfloat16)

    checkpoint = ModelCheckpoint.open(llama)
    exact = Engine(load_blocks(checkpoint, HOSTED))
    rounded = Engine(load_blocks(checkpoint, HOSTED, dtype=torch.bfloat16, device=device, transform=prepare))
    outputs = []
    for engine in (exact, rounded):
        generation = Generation.open(engine, CacheBudget(PLENTY, 1), batch_size=2)
        steps = [(generation.session, generation.step(num_tokens)) for num_tokens in (5, 1, 1)]
        outputs.append(torch.cat([engine.run([step])[0] for step in steps], 1))
    expected, found = outputs
    assert found.dtype == torch.float32
    error = float((found - expected).norm() / expected.norm())
    assert error < BLOCKS * {"none": 0.007, "bnb-int8": 0.02}[method], error  # mistakes are of order 1


def test_blocks_on_two_devices_are_no_one_stack(llama: Path) -> None:
    stack = split(llama, PLACEMENTS["cpu"])
    assert [view.span for view in stack.views(Span(1, 4))] == [Span(1, 2), Span(2, 3), Span(3, 4)]
    assert stack.view(Span(3, 5)).span == Span(3, 5)
    with pytest.raises(ValueError, match="blocks 1:3 are not all on one device: the devices have 0:2 and 2:3 and 3:6"):
        stack.view(Span(1, 3))
    with pytest.raises(ValueError, match="blocks 4:7 are not all among the hosted blocks 0:6"):
        stack.views(Span(4, 7))
