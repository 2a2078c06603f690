"""The attention kernel, on every instruction set of this processor, against its formula in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch

from swarm_models.kernels.attention import (
    AttentionKernel,
    Numbers,
    PagedRows,
    PartOfPage,
    attention_kernel,
    channel_table,
)
from tests.unit.models.kernels.conftest import instructions, on

pytestmark = pytest.mark.skipif(attention_kernel() is None, reason="the kernel was not compiled")
NAMES = [] if (compiled := attention_kernel()) is None else compiled.names
KEYS, VALUES = 1, 2  # channels of the pages
LENGTHS = [(1,), (2, 1), (63, 64, 65), (2000, 1, 130), tuple(range(1, 18))]
#        heads, kv_heads, widths of keys and values
SHAPES = [
    (32, 4, 64, 64),
    (4, 4, 80, 96),
    (8, 2, 96, 80),
    (12, 3, 100, 100),
    (8, 1, 128, 128),
    (7, 1, 256, 33),
    (19, 1, 3, 1),
]


@pytest.fixture(params=NAMES)
def kernel(request) -> Iterator[AttentionKernel]:
    with instructions(chosen := attention_kernel(), request.param):
        yield chosen


class Paged:
    """Rows whose keys and values are in up to three pages each, among others that must not matter."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Of each row [kv_heads, positions, width]."""
        self.keys, self.values = list(keys), list(values)
        self._tables: list[Numbers] = []
        self._pages: list[list[torch.Tensor]] = []
        rows = []
        self.last: list[tuple[list[torch.Tensor], int, int]] = []  # of each row: page, its row, its position
        for number, (of_row, its_values) in enumerate(zip(keys, values, strict=True)):
            heads, length, _ = of_row.shape
            bounds = sorted({0, length * (number % 3) // 3, length // 2 if number % 2 else 0, length})
            parts = []
            for start, end in pairwise(bounds):
                capacity, row, first = end - start + 5, number % 2, number % 4
                widths = 1, of_row.shape[2], its_values.shape[2]
                data = [torch.full((2, heads, capacity, width), torch.nan) for width in widths]
                data[KEYS][row, :, first : first + end - start] = of_row[:, start:end]
                data[VALUES][row, :, first : first + end - start] = its_values[:, start:end]
                self._pages.append(data)
                self._tables.append(channel_table(data))
                parts.append(PartOfPage(self._tables[-1].address, capacity, row, first, end - start, number))
            rows.append(parts)
            self.last.append((data, row, first + end - start - 1))
        self.rows = PagedRows(rows)
        self.channels = Numbers([KEYS] * len(rows)), Numbers([VALUES] * len(rows))

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int, key_width: int, value_width: int) -> Paged:
        generator = torch.Generator().manual_seed(0)
        keys = [torch.randn(heads, length, key_width, generator=generator) for length in lengths]
        return cls(keys, [torch.randn(heads, length, value_width, generator=generator) for length in lengths])

    def expected(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """softmax(q k^T * scaling) v in fp64, [rows, 1, heads, value_width]."""
        outputs = []
        for row, keys, values in zip(query.double(), self.keys, self.values, strict=True):
            shared = len(row) // len(keys)
            scores = torch.einsum("hw,hpw->hp", row[:, 0], keys.double().repeat_interleave(shared, 0)) * scaling
            outputs.append(torch.einsum("hp,hpw->hw", scores.softmax(-1), values.double().repeat_interleave(shared, 0)))
        return torch.stack(outputs)[:, None]


def queries(rows: int, heads: int, width: int) -> torch.Tensor:
    """As blocks make them: [rows, heads, 1, width], of which the heads of a row lie together."""
    return torch.randn(rows, 1, heads, width, generator=torch.Generator().manual_seed(9)).transpose(1, 2)


@cache
def case(
    shape: tuple[int, int, int, int], lengths: tuple[int, ...]
) -> tuple[Paged, torch.Tensor, dict[float | None, torch.Tensor]]:
    """Return keys and values, queries, and what is expected of them by scaling."""
    heads, kv_heads, key_width, value_width = shape
    paged, query = Paged.of(lengths, kv_heads, key_width, value_width), queries(len(lengths), heads, key_width)
    return paged, query, {None: paged.expected(query, key_width**-0.5), 0.3: paged.expected(query, 0.3)}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_that_of_the_formula(kernel, threads, shape, lengths):
    paged, query, outputs = case(shape, lengths)
    for scaling, expected in outputs.items():
        with on(threads):
            output = kernel.attend(paged.rows, paged.channels, query, shape[-1], scaling)
        torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=5e-6)


def test_no_bit_of_a_row_depends_on_other_rows_or_on_threads(kernel):
    lengths, (heads, kv_heads, width) = (700, 3, 2000, 64, 129, 1, 1500), (16, 2, 96)
    paged, query = Paged.of(lengths, kv_heads, width, width), queries(len(lengths), heads, width)
    together = kernel.attend(paged.rows, paged.channels, query, width, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert torch.equal(kernel.attend(paged.rows, paged.channels, query, width, None), together)
    torch.set_num_threads(threads)
    for number in range(len(lengths)):
        alone = Paged(paged.keys[number : number + 1], paged.values[number : number + 1])  # and in one page
        output = kernel.attend(alone.rows, alone.channels, query[number : number + 1], width, None)
        assert torch.equal(output[0], together[number]), number


def test_scores_of_any_size(kernel):
    paged, query = Paged.of((300, 65), 2, 64, 64), queries(2, 4, 64)
    for factor in (1e-30, 1e4, 1e18, 3e36):
        output = kernel.attend(paged.rows, paged.channels, query * factor, 64, 1.0)
        torch.testing.assert_close(output.double(), paged.expected(query * factor, 1.0), rtol=2e-5, atol=5e-6)


def test_what_is_not_a_number_stays_in_its_row(kernel):
    paged, query = Paged.of((300, 65), 2, 64, 64), queries(2, 4, 64).clone()
    query[0, :, 0, 5] = torch.nan
    output = kernel.attend(paged.rows, paged.channels, query, 64, None)
    assert output[0].isnan().all()
    assert not output[1].isnan().any()


def test_new_keys_and_values_go_to_the_last_position(kernel):
    paged = Paged.of((5, 1, 64), 3, 80, 33)
    new_keys, new_values = queries(3, 3, 80), torch.randn(3, 3, 1, 33)
    assert kernel.store(paged.rows, paged.channels, new_keys, new_values)
    for number, (data, row, last) in enumerate(paged.last):
        assert torch.equal(data[KEYS][row, :, last], new_keys[number, :, 0])
        assert torch.equal(data[VALUES][row, :, last], new_values[number, :, 0])
        paged.keys[number][:, -1], paged.values[number][:, -1] = new_keys[number, :, 0], new_values[number, :, 0]
    query = queries(3, 6, 80)
    output = kernel.attend(paged.rows, paged.channels, query, 33, None)
    torch.testing.assert_close(output.double(), paged.expected(query, 80**-0.5), rtol=2e-5, atol=5e-6)


def test_what_does_not_fit_is_refused_and_nothing_is_written(kernel):
    paged, query = Paged.of((5, 6), 2, 64, 32), queries(2, 4, 64)
    rows, channels = paged.rows, paged.channels
    assert kernel.attend(rows, channels, query, 32, None) is not None
    assert kernel.attend(rows, channels, query, 64, None) is None
    assert kernel.attend(rows, channels, query[..., :60], 32, None) is None
    assert kernel.attend(rows, channels, query[:, :3], 32, None) is None
    assert kernel.attend(rows, channels, query[:1], 32, None) is None
    assert kernel.attend(rows, channels, query.double(), 32, None) is None
    assert kernel.attend(rows, channels, query.expand(-1, -1, 2, -1), 32, None) is None
    keys, values = query[:, :2], query[:, :2, :, :32]
    for new in [(keys, keys), (values, values), (query, values), (keys[:1], values), (keys.double(), values)]:
        assert not kernel.store(rows, channels, *new)
    before = paged.expected(query, 0.125)
    assert torch.allclose(kernel.attend(rows, channels, query, 32, None).double(), before, atol=5e-6)
    assert kernel.store(rows, channels, keys, values)


def test_pages_of_another_type_are_refused(kernel):
    data = [torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(2)]
    table = channel_table(data)
    rows = PagedRows([[PartOfPage(table.address, 8, 0, 0, 4, 0)]])
    channels = Numbers([0]), Numbers([1])
    new = torch.zeros(1, 2, 1, 64)
    assert kernel.attend(rows, channels, new, 64, None) is None
    assert not kernel.store(rows, channels, new, new)
