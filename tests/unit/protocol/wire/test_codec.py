"""Tensors on the wire: they come back as they went, and what is no tensor is refused before it costs memory."""

from __future__ import annotations

import itertools
import math
import struct
import tracemalloc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.codec import (
    Assembler,
    EncodedRows,
    all_finite,
    counts_on,
    decode,
    decode_mask,
    decode_rows,
    encode,
    encode_mask,
    encode_positions,
    encode_whole,
    parts_of,
    split_rows,
)
from swarm_protocol.wire.constants import (
    MAX_BATCH_SIZE,
    MAX_CHANGES,
    MAX_MASK_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_POSITION_IDS,
    MAX_TENSOR_BYTES,
    MIB,
    PART_BYTES,
)
from swarm_protocol.wire.parsing import parse

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64]
BLOCK = 64

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bit pattern: NaN, infinities and denormals too."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def received(header: pb.Tensor, parts: list[bytes]) -> torch.Tensor:
    assembler = Assembler(header)
    for part in parts:
        assert not assembler.complete
        assembler.add(part)
    assert assembler.complete
    return assembler.tensor()


class TestRaw:
    @given(shapes, st.sampled_from(DTYPES), st.integers(0, 1000))
    def test_comes_back_bit_for_bit(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
        tensor = random_bits(shape, dtype, seed)
        header, parts = encode(tensor)
        assert parts == []
        assert bits(decode(pb.Tensor.FromString(header.SerializeToString()))) == bits(tensor)

    def test_is_little_endian_and_row_major(self) -> None:
        header, _ = encode(torch.tensor([[1.5, -2.0], [3.25, 1e-3]]))
        assert header.data == struct.pack("<4f", 1.5, -2.0, 3.25, 1e-3)
        header, _ = encode(torch.tensor([[1, -2], [3, 2**40]]))
        assert header.data == struct.pack("<4q", 1, -2, 3, 2**40)

    def test_takes_views_and_tensors_of_a_graph(self) -> None:
        weight = torch.arange(12.0).view(3, 4).requires_grad_()
        header, _ = encode((weight * 2).t()[1:])
        assert decode(header).tolist() == [[2, 10, 18], [4, 12, 20], [6, 14, 22]]

    def test_the_result_can_be_written_to(self) -> None:
        header, _ = encode(torch.zeros(4))
        decode(header).add_(1)
        assert decode(header).tolist() == [0, 0, 0, 0]


class TestInt8:
    def test_layout_is_maxima_then_values(self) -> None:
        tensor = torch.zeros(100)
        tensor[0], tensor[1], tensor[64], tensor[99] = 2.0, -1.0, -12.7, 0.1
        header, _ = encode(tensor, pb.INT8_BLOCKS)
        values = [0] * 2 * BLOCK
        values[0], values[1], values[64], values[99] = 127, -64, -127, 1  # -63.5 rounds to even
        assert header.data == struct.pack(f"<2f{2 * BLOCK}b", 2.0, torch.tensor(-12.7).abs().item(), *values)


class TestParts:
    @pytest.mark.parametrize("codec", [pb.RAW, pb.INT8_BLOCKS, pb.BFLOAT16_ELEMENTS])
    def test_large_tensors_travel_in_parts_of_a_mebibyte(self, codec: int) -> None:
        tensor = torch.randn(5, MIB // 4 + 3)
        header, parts = encode(tensor, codec)
        sizes = [len(header.data), *map(len, parts)]
        assert sum(sizes) == header.size_bytes > 1.2 * MIB
        assert sizes[:-1] == [PART_BYTES] * (len(sizes) - 1) and sizes[-1] <= PART_BYTES
        assert (received(header, parts) - tensor).abs().max() < (0.03 if codec else 1e-30)

    @pytest.mark.parametrize(("extra", "num_parts"), [(0, 0), (8, 1)])
    def test_a_part_holds_exactly_a_mebibyte(self, extra: int, num_parts: int) -> None:
        tensor = torch.arange((MIB + extra) // 8)
        header, parts = encode(tensor)
        assert len(parts) == num_parts
        assert torch.equal(received(header, parts), tensor)

    def test_all_parts_may_be_in_one_message(self) -> None:
        tensor = torch.arange(MIB // 8 + 1)
        assert torch.equal(decode(encode_whole(tensor)), tensor)

    @pytest.mark.parametrize(
        ("size", "sizes"), [(0, []), (PART_BYTES, [PART_BYTES]), (PART_BYTES + 1, [PART_BYTES, 1])]
    )
    def test_other_data_travel_in_parts_too(self, size: int, sizes: list[int]) -> None:
        assert [len(part) for part in parts_of(bytes(size))] == sizes

    @given(st.lists(st.integers(0, 60), max_size=5))
    def test_parts_may_be_cut_anywhere(self, cuts: list[int]) -> None:
        tensor = torch.arange(15, dtype=torch.float32)
        header, _ = encode(tensor)
        data, edges = header.data, [0, *sorted(cuts), 60]
        assembler = Assembler(pb.Tensor(dtype=pb.FLOAT32, shape=[15], size_bytes=60))
        for start, end in itertools.pairwise(edges):
            assembler.add(data[start:end])
        assert torch.equal(assembler.tensor(), tensor)

    def test_a_tensor_with_parts_missing_is_refused(self) -> None:
        header, parts = encode(torch.ones(MIB))
        assert len(parts) == 3
        with pytest.raises(RequestRejected, match=f"only {MIB} of {4 * MIB} bytes"):
            decode(header)

    def test_more_than_announced_is_refused(self) -> None:
        header, _ = encode(torch.ones(4))
        assembler = Assembler(header)
        with pytest.raises(RequestRejected, match="more than the announced 16 bytes"):
            assembler.add(b"x")
        header.data += b"x"
        with pytest.raises(RequestRejected, match="more than the announced 16 bytes"):
            Assembler(header)


def peak_bytes(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def header(dtype: int = pb.FLOAT32, shape: tuple[int, ...] = (2**28,), codec: int = pb.RAW, size: int = 0) -> pb.Tensor:
    return pb.Tensor(dtype=dtype, shape=shape, codec=codec, size_bytes=size)


class TestRefusals:
    @pytest.mark.parametrize(
        ("wire", "reason"),
        [
            (header(shape=(2**58,), size=2**60), f"{2**60} bytes is over the limit"),
            (header(shape=(2**27,), size=MAX_TENSOR_BYTES + 4), "over the limit"),
            (header(shape=(2**62, 2**62), size=MAX_TENSOR_BYTES), "takes .* bytes, not 268435456 as announced"),
            (header(shape=(2**26,), size=2**28 - 4), "takes 268435456 bytes, not 268435452"),
            (header(shape=(2**26 - 1,), size=2**28), "takes 268435452 bytes, not 268435456"),
            (header(shape=(2**26,), size=2**28, codec=pb.INT8_BLOCKS), "takes 71303168 bytes"),
            (header(shape=(-1, -(2**26)), size=2**28), "no shape"),
            (header(shape=(1, 1, 1, 1, 2**26), size=2**28), "at most 4 dimensions"),
            (header(shape=(0, 2**62, 2**62)), "over the limit"),
            (header(dtype=pb.DTYPE_UNSPECIFIED, size=2**28), "dtype 0 is unknown"),
            (header(dtype=99, size=2**28), "dtype 99 is unknown"),
            (header(shape=(2**26, 64), size=2**26 * 34, codec=pb.INT4_BLOCKS), "over the limit"),
            (header(shape=(2**22, 64), size=2**22 * 34, codec=pb.INT4_BLOCKS), "over the limit of .* decoded"),
            (header(shape=(2**21, 64), size=2**21 * 34 + 1, codec=pb.INT4_BLOCKS), "takes 71303168 bytes"),
            (header(shape=(2**62, 2**62), size=2**20, codec=pb.INT4_BLOCKS), "takes .* bytes, not 1048576"),
            (header(shape=(2**26,), dtype=pb.INT32, size=2**27, codec=pb.BFLOAT16_ELEMENTS), "codec 2 .* is unknown"),
            (header(shape=(2**26,), codec=7, size=2**28), "codec 7 .* is unknown"),
            (header(shape=(2**25,), dtype=pb.INT64, codec=pb.INT8_BLOCKS, size=2**28), "codec 1 .* is unknown"),
        ],
    )
    def test_cost_no_memory(self, wire: pb.Tensor, reason: str) -> None:
        def refused() -> None:
            with pytest.raises(RequestRejected, match=reason):
                Assembler(wire)

        assert peak_bytes(refused) < 64 * 1024

    def test_what_is_announced_costs_memory_only_once_it_arrives(self) -> None:
        announced = header(shape=(MAX_TENSOR_BYTES // 4,), size=MAX_TENSOR_BYTES)
        assert peak_bytes(lambda: Assembler(announced)) < 64 * 1024
        announced.data = bytes(MIB)
        assert MIB <= peak_bytes(lambda: Assembler(announced)) < 3 * MIB

    def test_the_limit_itself_is_allowed(self) -> None:
        assert not Assembler(header(shape=(MIB,), size=4 * MIB), max_bytes=4 * MIB).complete
        with pytest.raises(RequestRejected, match=f"over the limit of {4 * MIB - 1} bytes"):
            Assembler(header(shape=(MIB,), size=4 * MIB), max_bytes=4 * MIB - 1)

    @given(
        dtype=st.integers(0, 6),
        shape=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=6),
        codec=st.integers(0, 4),
        size=st.integers(0, 2**64 - 1) | st.integers(0, 200),
        data=st.binary(max_size=200),
    )
    def test_any_header_gives_a_tensor_or_a_refusal(self, data: bytes, size: int, **fields) -> None:
        try:
            tensor = decode(pb.Tensor(size_bytes=size, data=data, **fields), max_bytes=1024)
        except RequestRejected:
            return
        assert list(tensor.shape) == fields["shape"]


class TestMasks:
    @given(st.integers(1, 5), st.integers(1, 9), st.data())
    def test_round_trip(self, rows: int, columns: int, data: st.DataObject) -> None:
        mask = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=rows * columns, max_size=rows * columns)))
        decoded = decode_mask(encode_mask(mask.view(rows, columns)), rows, columns)
        assert torch.equal(decoded, mask.view(rows, columns))

    def test_ones_travel_empty(self) -> None:
        assert encode_mask(torch.ones(2, 500)).values == b""
        assert encode_mask(torch.ones(2, 3, dtype=torch.bool)).values == b""
        assert encode_mask(None) is None

    def test_anything_but_zero_attends(self) -> None:
        assert encode_mask(torch.tensor([[True, False], [True, True]])).values == b"\x0d"
        assert encode_mask(torch.tensor([[0.5, 0.0]])).values == b"\1"

    def test_another_size_is_refused(self) -> None:
        with pytest.raises(RequestRejected, match="has 5 bytes, but batch size 3 and 3 positions need 2"):
            decode_mask(pb.AttentionMask(values=bytes(5)), 3, 3)

    def test_what_is_too_large_for_a_message_is_not_sent(self) -> None:
        rows, columns = 128, MAX_MASK_BYTES // 16  # 32k positions
        mask = torch.ones(rows, columns, dtype=torch.int8)
        mask[0, 0] = 0
        assert len(encode_mask(mask).values) == MAX_MASK_BYTES
        assert torch.equal(decode_mask(encode_mask(mask), rows, columns), mask.long())
        with pytest.raises(RequestRejected, match=r"129 × 32768 positions is too large .* most 4194304 in all"):
            encode_mask(torch.cat([mask, mask[:1]]))


class TestPositions:
    @pytest.mark.parametrize("shape", [(1, 5), (3, 2), (4096, 24)])
    def test_round_trip(self, shape: tuple[int, int]) -> None:
        ids = torch.randint(2**31 - 1, shape)
        assert torch.equal(decode(encode_positions(ids)).long(), ids)

    def test_none_are_none(self) -> None:
        assert encode_positions(None) is None

    @pytest.mark.parametrize("ids", [[[2**31]], [[0, -(2**40)]]])
    def test_what_no_model_has_is_not_sent(self, ids: list[list[int]]) -> None:
        with pytest.raises(RequestRejected, match="are outside any model"):
            encode_positions(torch.tensor(ids))

    def test_what_is_too_large_for_a_message_is_not_sent(self) -> None:
        with pytest.raises(RequestRejected, match=r"1 × 98305 positions are too many .* expected at most 98304"):
            encode_positions(torch.arange(MAX_POSITION_IDS + 1)[None])


def test_the_largest_step_of_all_is_one_message() -> None:
    mask = torch.zeros(1, 8 * MAX_MASK_BYTES)
    header, parts = encode(torch.zeros(PART_BYTES))
    reorder = pb.Change(reorder=pb.Reorder(indices=[MAX_BATCH_SIZE - 1] * MAX_BATCH_SIZE))
    step = pb.Step(
        number=2**64 - 1,
        changes=[reorder] * MAX_CHANGES,
        start_position=2**64 - 1,
        hidden=header,
        attention_mask=encode_mask(mask),
        position_ids=encode_positions(torch.full((MAX_BATCH_SIZE, MAX_POSITION_IDS // MAX_BATCH_SIZE), 2**31 - 1)),
    )
    assert parts
    assert MAX_MESSAGE_BYTES * 0.9 < pb.SessionRequest(step=step).ByteSize() <= MAX_MESSAGE_BYTES
    parse(pb.SessionRequest, pb.SessionRequest(step=step).SerializeToString())


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 300))
def test_split_rows_keeps_all_rows_within_the_limit(rows: int, columns: int, max_bytes: int) -> None:
    tensor = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    pieces = list(split_rows(tensor, max_bytes))
    assert torch.equal(torch.cat(pieces), tensor)
    if max_bytes >= 4 * columns:  # one row at least fits
        assert all(encode(piece)[0].size_bytes <= max_bytes for piece in pieces)
        assert all(len(piece) + 1 > max_bytes // (4 * columns) for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("ids", "start", "expected"),
    [
        ([[7]], 7, True),
        ([[7]], 8, False),
        ([[7, 8, 9]], 7, True),
        ([[7, 8, 8]], 7, False),
        ([[7], [7]], 7, False),  # of each row: as well, but nobody sends it
        ([[2**31 - 1]], 2**31 - 1, True),
    ],
)
def test_positions_that_count_on(ids: list[list[int]], start: int, expected: bool) -> None:
    assert counts_on(encode_positions(torch.tensor(ids)), start, len(ids[0])) is expected


def test_what_is_no_row_of_positions_does_not_count_on() -> None:
    whole = encode_positions(torch.tensor([[7]]))
    for change in ({"dtype": pb.FLOAT32}, {"size_bytes": 8}, {"data": b"7"}, {"codec": pb.INT8_BLOCKS}, {"shape": [1]}):
        other = pb.Tensor()
        other.CopyFrom(whole)
        for name, value in change.items():
            if name == "shape":
                other.shape[:] = value
            else:
                setattr(other, name, value)
        assert not counts_on(other, 7, 1)
    assert not counts_on(whole, 2**40, 1)


def test_a_sum_that_overflows_is_looked_at_again() -> None:
    assert all_finite(torch.full((4,), 3e38))
    assert all_finite(torch.full((100,), 6e4, dtype=torch.float16))
    for wrong in (float("nan"), float("inf"), -float("inf")):
        assert not all_finite(torch.tensor([1.0, wrong, 2.0]))
    assert not all_finite(torch.tensor([float("inf"), -float("inf")]))


@pytest.mark.parametrize("codec", [pb.RAW, pb.BFLOAT16_ELEMENTS, pb.INT8_BLOCKS, pb.INT4_BLOCKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_together_are_encoded_and_decoded_as_each_alone(codec: pb.Codec, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = [encode(row, codec)[0] for row in tensor.split(1)]
    rows = EncodedRows(tensor, codec)
    wires = [pb.Tensor(data=data) for data in rows.data]
    for wire in wires:
        wire.MergeFrom(rows.header)
    assert wires == alone
    assert torch.equal(decode_rows(wires), torch.cat([decode(wire) for wire in alone]))
