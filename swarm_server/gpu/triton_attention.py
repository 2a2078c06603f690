"""Attention of one new position of every row on a GPU, in Triton, on keys and values where they are stored.

Several programs share the positions of a row, and their sums are joined afterwards. One row alone would leave most of a
GPU idle: "split K", https://pytorch.org/blog/flash-decoding (Dao et al., 2023). Each program keeps a running maximum
(Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swarm_server.gpu.row_tables import FIELDS, PARTS

_PROGRAMS = 256  # programs that a GPU runs at the same time, about
_MOST_SHARES = 32
_ALIGNMENT = 16  # bytes: pages are aligned, and so are positions in them if their size is a multiple
_MIN_SIDE = 16  # least side of the matrices that tl.dot multiplies
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class TritonAttention:
    """The attention kernels for tensors on one device, which must be the current device."""

    def store(self, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values to the last position of every row.

        Args:
            table: one block's part of ``row_tables``, [rows, PARTS, FIELDS].
            keys, values: the new keys and values, [rows, kv_heads, 1, width of each].
        """
        (num_rows, heads, _, width), value_width = keys.shape, values.shape[3]
        _store[(num_rows, heads)](
            table,
            keys.contiguous(),
            values.contiguous(),
            heads,
            width,
            value_width,
            _side(width),
            _side(value_width),
            PARTS,
            FIELDS,
            _TYPES[keys.dtype],
        )

    def attend(
        self, table: torch.Tensor, query: torch.Tensor, kv_heads: int, value_width: int, scaling: float
    ) -> torch.Tensor:
        """Return attention [rows, 1, heads, value_width] of ``query`` [rows, heads, 1, width]; 0 without positions."""
        num_rows, heads, _, width = query.shape
        group = heads // kv_heads
        shares = min(_MOST_SHARES, 1 << (_PROGRAMS // (num_rows * kv_heads) | 1).bit_length() - 1)
        side, value_side = _side(group), _side(value_width)
        sums = query.new_empty(2, num_rows, kv_heads, shares, side, dtype=torch.float32)
        parts = query.new_empty(num_rows, kv_heads, shares, side, value_side, dtype=torch.float32)
        output = query.new_empty(num_rows, 1, heads, value_width)
        _attend_share[(num_rows, kv_heads, shares)](
            query.contiguous(),
            table,
            sums[0],
            sums[1],
            parts,
            scaling,
            kv_heads,
            group,
            side,
            width,
            _side(width),
            value_width,
            value_side,
            PARTS,
            FIELDS,
            64 if max(width, value_width) <= 128 and query.dtype.itemsize == 2 else 32,
            all(size * query.dtype.itemsize % _ALIGNMENT == 0 for size in (width, value_width)),
            _TYPES[query.dtype],
        )
        _join[(num_rows, heads)](
            sums[0],
            sums[1],
            parts,
            output,
            shares,
            kv_heads,
            group,
            side,
            value_width,
            value_side,
            _TYPES[query.dtype],
        )
        return output


def _side(size: int) -> int:
    return max(_MIN_SIDE, 1 << (size - 1).bit_length())


@triton.jit
def _store(
    table,
    keys,
    values,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SIDE: tl.constexpr,
    VALUE_SIDE: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    TYPE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    last = table + row * PARTS * FIELDS  # the first part has the last position; for its fields see row_tables
    length = tl.load(last + 3)
    if length > 0:
        place = head * tl.load(last + 2) + length - 1
        columns, value_columns = tl.arange(0, SIDE), tl.arange(0, VALUE_SIDE)
        key = tl.load(keys + (row * HEADS + head) * WIDTH + columns, columns < WIDTH, 0)
        value = tl.load(values + (row * HEADS + head) * VALUE_WIDTH + value_columns, value_columns < VALUE_WIDTH, 0)
        at = tl.load(last).to(tl.pointer_type(TYPE)) + place * WIDTH
        value_at = tl.load(last + 1).to(tl.pointer_type(TYPE)) + place * VALUE_WIDTH
        tl.store(at + columns, key, columns < WIDTH)
        tl.store(value_at + value_columns, value, value_columns < VALUE_WIDTH)


@triton.jit
def _attend_share(
    query,
    table,
    maxima,
    totals,
    parts,
    scaling,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SIDE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_SIDE: tl.constexpr,
    PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    TYPE: tl.constexpr,
):
    row, head, share = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    shares = tl.num_programs(2)
    members, columns, value_columns = tl.arange(0, GROUP_SIDE), tl.arange(0, SIDE), tl.arange(0, VALUE_SIDE)
    at = ((row * HEADS + head) * GROUP + members)[:, None] * WIDTH + columns[None, :]
    rows = tl.load(query + at, (members < GROUP)[:, None] & (columns < WIDTH)[None, :], 0)
    most = tl.full([GROUP_SIDE], -1e30, tl.float32)  # not -inf: where no position is, -inf - -inf would give NaN
    total = tl.zeros([GROUP_SIDE], tl.float32)
    result = tl.zeros([GROUP_SIDE, VALUE_SIDE], tl.float32)
    for part in tl.static_range(PARTS):
        entry = table + (row * PARTS + part) * FIELDS
        keys = tl.load(entry).to(tl.pointer_type(TYPE))
        values = tl.load(entry + 1).to(tl.pointer_type(TYPE))
        if IS_ALIGNED:  # otherwise Triton would load number by number
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        first_of_head = head * tl.load(entry + 2)
        length = tl.load(entry + 3).to(tl.int32)
        for first in range(share * BLOCK, length, shares * BLOCK):
            positions = first + tl.arange(0, BLOCK)
            there = positions < length
            places = first_of_head + positions
            key = tl.load(
                keys + places[None, :] * WIDTH + columns[:, None], there[None, :] & (columns < WIDTH)[:, None], 0
            )
            scores = tl.dot(rows, key, input_precision="ieee") * scaling
            scores = tl.where(there[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp(scores - higher[:, None])
            shrunk = tl.exp(most - higher)
            value = tl.load(
                values + places[:, None] * VALUE_WIDTH + value_columns[None, :],
                there[:, None] & (value_columns < VALUE_WIDTH)[None, :],
                0,
            )
            total = total * shrunk + tl.sum(weights, 1)
            result = result * shrunk[:, None] + tl.dot(weights.to(TYPE), value, input_precision="ieee")
            most = higher
    place = ((row * HEADS + head) * shares + share) * GROUP_SIDE + members
    tl.store(maxima + place, most)
    tl.store(totals + place, total)
    tl.store(parts + place[:, None] * VALUE_SIDE + value_columns[None, :], result)


@triton.jit
def _join(
    maxima,
    totals,
    parts,
    output,
    SHARES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SIDE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_SIDE: tl.constexpr,
    TYPE: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # of the queries
    member = head % GROUP
    columns, shares = tl.arange(0, VALUE_SIDE), tl.arange(0, SHARES)
    places = ((row * HEADS + head // GROUP) * SHARES + shares) * GROUP_SIDE + member
    most = tl.load(maxima + places)
    weights = tl.exp(most - tl.max(most, 0))
    total = tl.sum(weights * tl.load(totals + places), 0)
    result = tl.sum(weights[:, None] * tl.load(parts + places[:, None] * VALUE_SIDE + columns[None, :]), 0)
    result = result / tl.where(total > 0, total, 1)  # rows without positions give 0
    at = (row * HEADS * GROUP + head) * VALUE_WIDTH + columns
    tl.store(output + at, result.to(TYPE), columns < VALUE_WIDTH)
