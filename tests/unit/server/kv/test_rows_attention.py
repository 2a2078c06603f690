"""The attention kernel in a batch's cache: what it takes over gives what today's path gives; the rest goes that way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarm_models.kernels.attention import attention_kernel
from swarm_server.kv.kv_cache import CacheBudget
from swarm_server.kv.kv_rows import Channel, ChannelPlace, KvGroup, KvRow, PageLayout, grow, runs
from swarm_server.kv.rows_attention import hidden_at_start, is_plain_sdpa
from swarm_server.kv.rows_cache import BlockRuns, RowsCache

pytestmark = pytest.mark.skipif(attention_kernel() is None, reason="the kernel was not compiled")
HEADS, KV_HEADS, WIDTH = 6, 2, 20
MODULE = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
SESSIONS = [(1, 5), (3, 70), (1, 1), (2, 130)]  # rows, positions with the new one
LENGTH, NUM_ROWS = max(length for _, length in SESSIONS), sum(count for count, _ in SESSIONS)


class Counting:
    """The kernel, and how often it attended."""

    def __init__(self) -> None:
        self.kernel, self.attended = attention_kernel(), 0

    def store(self, *arguments) -> bool:
        return self.kernel.store(*arguments)

    def attend(self, *arguments) -> torch.Tensor | None:
        output = self.kernel.attend(*arguments)
        self.attended += output is not None
        return output


@pytest.fixture
def block() -> BlockRuns:
    """Sessions whose rows are on several pages."""
    generator = torch.Generator().manual_seed(0)
    group = KvGroup((Channel(KV_HEADS, WIDTH, torch.float32), Channel(KV_HEADS, WIDTH + 4, torch.float32)), None)
    layout = PageLayout((group,), (ChannelPlace(0, 0, 1),))
    budget, found = CacheBudget(1 << 40, 1), []
    for count, length in SESSIONS:
        rows, lease = (KvRow.empty(layout),) * count, budget.lease("")
        for num_tokens in (length // 3, length - length // 3):
            rows = grow(rows, rows, num_tokens, layout, lease).rows if num_tokens else rows
        for page in {part.page for row in rows for part in row.parts[0]}:
            for data in page.data:
                data.normal_(generator=generator)
        found += runs(rows, 0, sum(len(range(run.rows.start, run.rows.stop)) for run in found))
    assert max(len(run.parts) for run in found) > 1
    return BlockRuns(tuple(found), (0,) * len(found), (1,) * len(found))


def attended(block: BlockRuns, kernel, mask: torch.Tensor | None, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(NUM_ROWS, 1, HEADS, WIDTH, generator=generator).transpose(1, 2)
    keys = torch.randn(NUM_ROWS, KV_HEADS, 1, WIDTH, generator=generator)
    values = torch.randn(NUM_ROWS, KV_HEADS, 1, WIDTH + 4, generator=generator)
    cache = RowsCache((block,), LENGTH, 1, True, (), kernel)
    cache.update(keys, values, 0)
    return cache.attend(ALL_ATTENTION_FUNCTIONS["sdpa"], MODULE, query, mask, True, **options)


def padding(*hidden: int) -> torch.Tensor:
    """[rows, 1, 1, length]: the first positions of each row that are left out, and what is before the row."""
    lengths = [length for count, length in SESSIONS for _ in range(count)]
    first = torch.tensor([LENGTH - length + count for length, count in zip(lengths, hidden, strict=True)])
    return (torch.arange(LENGTH) >= first[:, None])[:, None, None]


def added(mask: torch.Tensor, least: float = torch.finfo(torch.float32).min) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, least)


NOTHING, WINDOW = padding(0, 0, 0, 0, 0, 0, 0), padding(1, 66, 66, 66, 0, 126, 126)
ROWS_DIFFER = padding(0, 0, 69, 20, 0, 0, 129)


@pytest.mark.parametrize(
    "mask", [None, NOTHING, WINDOW, ROWS_DIFFER, added(WINDOW), added(ROWS_DIFFER, -torch.inf)], ids=range(6)
)
def test_the_kernel_gives_what_sdpa_gives(block, mask):
    kernel = Counting()
    output = attended(block, kernel, mask, scaling=0.3)
    assert kernel.attended == 1
    torch.testing.assert_close(output, attended(block, None, mask, scaling=0.3), rtol=2e-5, atol=5e-6)


def test_new_keys_and_values_are_stored_as_without_the_kernel(block):
    by_kernel, without = [], []
    for kernel, stored in ((Counting(), by_kernel), (None, without)):
        pages = [part.page for run in block.runs for part in run.parts]
        attended(block, kernel, None, scaling=None)
        stored += [data.clone() for page in pages for data in page.data]
    assert all(torch.equal(one, other) for one, other in zip(by_kernel, without, strict=True))


def test_a_page_is_found_after_it_was_trimmed(block):
    expected = attended(block, Counting(), None, scaling=None)
    for run in block.runs:
        for part in run.parts:
            part.page.trim()
    assert torch.equal(attended(block, Counting(), None, scaling=None), expected)


def test_other_masks_are_left_to_sdpa(block):
    holes = NOTHING.clone()
    holes[:, :, :, -2] = False
    bias = torch.zeros(NUM_ROWS, 1, 1, LENGTH).masked_fill(~NOTHING, torch.finfo(torch.float32).min)
    bias[..., -1] = -1.0
    for mask in (holes, bias):
        kernel = Counting()
        output = attended(block, kernel, mask, scaling=0.3)
        assert kernel.attended == 0
        torch.testing.assert_close(output, attended(block, None, mask, scaling=0.3), rtol=2e-5, atol=5e-6)


def test_how_many_positions_a_mask_hides_at_the_start():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    assert hidden_at_start(mask, 2) == [2, 0]
    assert hidden_at_start(mask[:1], 3) == [2, 2, 2]
    assert hidden_at_start(None, 2) == [0, 0]
    assert hidden_at_start(~mask, 2) is None


def test_options_that_change_what_sdpa_does():
    assert is_plain_sdpa({"dropout": 0.0, "scaling": 0.1, "sliding_window": 4, "is_causal": True, "softcap": None})
    for options in ({"dropout": 0.1}, {"position_bias": torch.zeros(1)}, {"softcap": 30.0}):
        assert not is_plain_sdpa(options)
