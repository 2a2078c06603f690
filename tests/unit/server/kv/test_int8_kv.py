"""Keys and values in int8: half a step of rounding, the same bytes wherever they go, and room for more positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import RequestRejected
from swarm_protocol.span import Span
from swarm_protocol.wire.constants import PAGE_TOKENS
from swarm_server.blocks.blocks import BlockStack, load_blocks
from swarm_server.engine.engine import Engine
from swarm_server.engine.session_state import Crop, HistoryChange, Reorder
from swarm_server.engine.ways import Ways, fastest_ways
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.kv_rows import Channel, runs
from swarm_server.kv.prefix_cache import PrefixCache
from tests.marks import always
from tests.unit.server.engine.test_engine import HOSTED, PLENTY, Generation
from tests.zoo import save_checkpoint

KINDS = ("llama", "gemma3_text", "deepseek_v3", "deepseek_v32", "lfm2", "falcon-7b")  # windows, an index, states
ERROR, CHOSEN_ERROR = 0.1, 0.3  # relative, of outputs; where an index chooses positions, rounding may choose others


@pytest.fixture(scope="module", params=always("llama", "gemma3_text", among=KINDS))
def engines(request, tmp_path_factory) -> tuple[Engine, Engine]:
    """One with keys and values as they are computed, and one with int8."""
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(request.param, directory, initializer_range=0.1)
    plain, int8 = (
        Engine(load_blocks(ModelCheckpoint.open(directory), HOSTED), prefix_cache=PrefixCache(), kv_quant=kv_quant)
        for kv_quant in ("none", "int8")
    )
    return plain, int8


def opened(engine: Engine, batch_size: int = 1, seed: int = 0, **options) -> Generation:
    return Generation.open(engine, CacheBudget(PLENTY, 1), batch_size=batch_size, seed=seed, **options)


def step(generation: Generation, num_tokens: int, *changes: HistoryChange, hidden=None) -> torch.Tensor:
    work = generation.session, generation.step(num_tokens, *changes, hidden=hidden)
    (output,) = generation.engine.run([work])
    assert isinstance(output, torch.Tensor), output
    return output


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_is_off_by_half_a_step_of_its_head(dtype: torch.dtype) -> None:
    channel = Channel(4, 6, dtype, in_int8=True)
    data = (torch.randn(2, 3, 4, 6).transpose(1, 2) * torch.logspace(-2, 2, 3)[:, None]).to(dtype)
    data[0, 0, 0] = 0
    data[1, 1, 1, 0] = float("nan")
    stored = channel.rounded(data)
    assert stored.shape == (2, 4, 3, 10) and stored.dtype == torch.uint8
    read = channel.expanded(stored)
    assert read.shape == data.shape and read.dtype == dtype
    spoilt = torch.zeros(2, 4, 3, dtype=torch.bool)
    spoilt[1, 1, 1] = True
    assert read[1, 1, 1].isnan().all() and read[~spoilt].isfinite().all()
    wide, step = data.double(), data.double().abs().amax(-1, keepdim=True) / 127
    off = (read.double() - wide).abs() - wide.abs() * torch.finfo(dtype).eps
    assert (off <= step * 0.5001)[~spoilt].all()


def test_a_position_takes_a_byte_for_each_number_and_four_for_each_head(engines) -> None:
    plain, int8 = engines
    pairs = list(zip(plain.layout.blocks, int8.layout.blocks, strict=True))
    for before, after in pairs:
        assert after.slots == before.slots and after.index == before.index
        for floats, stored in ((before.keys, after.keys), (before.values, after.values)):
            if floats is not None:
                assert stored == replace(floats, in_int8=True)
                assert stored.token_bytes == floats.heads * (floats.width + 4)
    assert int8.layout.token_bytes < plain.layout.token_bytes
    assert int8.ways.attention is None and int8.ways.graphs is None
    assert int8.ways.in_place == plain.ways.in_place


def test_one_row_at_a_time_is_expanded(engines) -> None:
    for engine, num_runs in zip(engines, (1, 3), strict=True):
        generation = opened(engine, batch_size=3, reserved=8)
        step(generation, 2)
        rows = generation.session.state.rows
        for group in range(len(generation.session.layout.groups)):
            assert len(runs(rows, group, 0)) == num_runs


class OnGpu:
    """A stack, or a view of it, that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, stack: BlockStack) -> None:
        self._stack = stack

    def __getattr__(self, name: str) -> object:
        return getattr(self._stack, name)

    def views(self, span: Span) -> list[OnGpu]:
        return [OnGpu(view) for view in self._stack.views(span)]


def test_gpus_read_it_where_it_is_stored_too(engines) -> None:
    _, int8 = engines
    before, int8.ways = int8.ways, Ways()
    assert fastest_ways(OnGpu(int8._stack), int8.layout, int8._try_rows) == before
    int8.ways = before


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_outputs_on_cuda(name: str, tmp_path) -> None:
    save_checkpoint(name, tmp_path, initializer_range=0.1)
    checkpoint = ModelCheckpoint.open(tmp_path)
    plain = Engine(load_blocks(checkpoint, HOSTED))
    int8 = Engine(load_blocks(checkpoint, HOSTED, device="cuda"), kv_quant="int8")
    assert int8.ways.in_place, int8.ways.refusal
    generations = [opened(engine, batch_size=2) for engine in (plain, int8)]
    for num_tokens in (20, 1, 150, 1):
        expected, output = (step(generation, num_tokens) for generation in generations)
        assert 0 < error(output, expected) < ERROR


def test_outputs_are_those_of_rounded_keys_and_values(engines) -> None:
    """Through growing, forks and crops, which move what is stored, and through several pages of a long session."""
    generations = [opened(engine, batch_size=2) for engine in engines]
    most = CHOSEN_ERROR if engines[0].layout.has_index else ERROR
    history: list[tuple[int, tuple[HistoryChange, ...]]] = [(20, ()), (1, ()), (1, (Reorder((1, 1)),)), (1, ())]
    if not engines[0].layout.has_states:
        history += [(3, (Crop(21),)), (150, ()), (1, ()), (1, (Reorder((1, 0)),))]
    for num_tokens, changes in history:
        expected, output = (step(generation, num_tokens, *changes) for generation in generations)
        assert 0 < error(output, expected) < most


def test_a_prompt_in_parts_is_that_in_one_piece(engines) -> None:
    _, int8 = engines
    whole, parts = opened(int8), opened(int8, seed=1)
    expected = step(whole, 24)
    outputs = [step(parts, len(part[0]), hidden=part) for part in whole.hidden.split([7, 1, 1, 15], 1)]
    assert error(torch.cat(outputs, 1), expected) < 5e-3  # tiny differences may become a step of int8


def test_what_is_stored_travels_as_it_is(engines) -> None:
    plain, int8 = engines
    original, other = opened(int8), opened(plain)
    for generation in (original, other):
        step(generation, 30)
    stored = int8.stored(original.session, 0, 30)
    copy = opened(int8, seed=2)
    int8.adopt(copy.session, 0, (), stored)
    again = int8.stored(copy.session, 0, 30)
    assert torch.equal(again.data, stored.data) and len(stored.data) < len(plain.stored(other.session, 0, 30).data)
    hidden = torch.randn(1, 1, original.hidden.shape[2], generator=torch.Generator().manual_seed(5))
    copy.hidden, copy.mask = original.hidden, original.mask
    assert torch.equal(step(copy, 1, hidden=hidden), step(original, 1, hidden=hidden))
    for target, taken in ((plain, stored), (int8, plain.stored(other.session, 0, 30))):
        with pytest.raises(RequestRejected, match="the servers store them differently"):
            target.adopt(opened(target).session, 0, (), taken)


def test_equal_prompts_are_shared(engines) -> None:
    _, int8 = engines
    if int8.layout.has_states:
        pytest.skip("sessions with states do not share")
    first = opened(int8, seed=7, keeps_outputs=True)
    expected = step(first, 2 * PAGE_TOKENS + 3)
    before = int8.counters.positions["reused"]
    output = step(opened(int8, seed=7, keeps_outputs=True), 2 * PAGE_TOKENS + 3)
    assert int8.counters.positions["reused"] - before == 2 * PAGE_TOKENS
    assert error(output, expected) < 5e-3
