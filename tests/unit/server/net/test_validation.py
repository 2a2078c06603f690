"""What a server refuses before it takes memory or time for a request."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from swarm_protocol.errors import PeerMoved, RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.codec import encode, encode_positions
from swarm_protocol.wire.constants import (
    MAX_ADDITIONS,
    MAX_BATCH_SIZE,
    MAX_CHANGES,
    MAX_JOINED,
    MAX_NAME_CHARS,
    MAX_WINDOWS,
    PAGE_TOKENS,
    WIRE_VERSION,
)
from swarm_server.net.validation import RequestValidator

HIDDEN = 8
VALIDATOR = RequestValidator("model", "revision", Span(10, 20), HIDDEN, max_positions=100, max_tensor_bytes=4096)
UNLIMITED = RequestValidator("model", "revision", Span(10, 20), HIDDEN, max_positions=None)


def contract(start: int = 10, end: int = 20, **fields: object) -> pb.Contract:
    known = dict(wire_version=WIRE_VERSION, model="model", revision="revision", blocks=pb.Span(start=start, end=end))
    return pb.Contract(**(known | fields))


class TestContract:
    @pytest.mark.parametrize(("start", "end"), [(10, 20), (12, 13), (10, 11), (19, 20)])
    def test_any_span_of_the_hosted_blocks_is_served(self, start: int, end: int) -> None:
        assert VALIDATOR.blocks(contract(start, end)) == Span(start, end)

    @pytest.mark.parametrize(
        ("refused", "reason"),
        [
            (contract(9, 20), "holds blocks 10:20, not 9:20"),
            (contract(10, 21), "holds blocks 10:20, not 10:21"),
            (contract(0, 5), "holds blocks 10:20, not 0:5"),
            (contract(revision="other"), "serves model at revision revision, .* expects model at revision other"),
            (contract(model="other"), "the client expects other at revision revision"),
            (contract(wire_version=WIRE_VERSION + 1), f"wire version {WIRE_VERSION}, the client {WIRE_VERSION + 1}"),
            (pb.Contract(), "wire version"),
        ],
    )
    def test_what_is_served_elsewhere_or_no_longer_sends_the_client_on(self, refused: pb.Contract, reason: str) -> None:
        with pytest.raises(PeerMoved, match=reason):
            VALIDATOR.blocks(refused)

    @pytest.mark.parametrize(("start", "end"), [(0, 0), (12, 12), (15, 12)])
    def test_no_span_is_the_clients_mistake(self, start: int, end: int) -> None:
        with pytest.raises(RequestRejected, match=f"blocks {start}:{end} are no range of blocks"):
            VALIDATOR.blocks(contract(start, end))


@pytest.mark.parametrize("size", [0, -1, MAX_BATCH_SIZE + 1, 2**32 - 1])
def test_other_batch_sizes_are_refused(size: int) -> None:
    with pytest.raises(RequestRejected, match=f"batch size {size} is out of range: expected 1 to 4096"):
        VALIDATOR.batch_size(size)


class TestHidden:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_good_ones_arrive(self, dtype: torch.dtype) -> None:
        tensor = torch.randn(2, 3, HIDDEN).to(dtype)
        assembler = VALIDATOR.hidden(encode(tensor)[0])
        assert assembler.complete
        assert torch.equal(assembler.tensor(), tensor)

    @pytest.mark.parametrize(
        "shape",
        [(), (HIDDEN,), (2, HIDDEN), (2, 3, 7), (2, 3, HIDDEN, 1), (2, 0, HIDDEN)],
    )
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(RequestRejected) as caught:
            VALIDATOR.hidden(encode(torch.zeros(shape))[0])
        assert str(caught.value) == f"hidden states have shape {list(shape)}: expected [batch, tokens, {HIDDEN}]"

    def test_only_steps_have_additions(self) -> None:
        tensor = torch.randn(2, 3, 1 + MAX_ADDITIONS, 1)
        validator = dataclasses.replace(VALIDATOR, hidden_size=1)
        assert torch.equal(validator.new_positions(encode(tensor)[0]).tensor(), tensor)
        with pytest.raises(RequestRejected, match="hidden states have shape"):
            validator.hidden(encode(tensor)[0])
        for num_stacked in (1, 2 + MAX_ADDITIONS):
            with pytest.raises(RequestRejected, match="hidden states have shape"):
                validator.new_positions(encode(torch.zeros(2, 3, num_stacked, 1))[0])

    @pytest.mark.parametrize("rows", [0, MAX_BATCH_SIZE + 1])
    def test_the_batch_size_is_limited_where_it_is_free(self, rows: int) -> None:
        with pytest.raises(RequestRejected, match=f"batch size {rows} is out of range"):
            UNLIMITED.hidden(encode(torch.zeros(rows, 1, HIDDEN))[0])

    def test_whole_numbers_are_refused(self) -> None:
        with pytest.raises(RequestRejected, match="no floating-point tensor"):
            VALIDATOR.hidden(encode(torch.zeros(2, 3, HIDDEN, dtype=torch.int64))[0])

    def test_too_many_bytes_are_refused(self) -> None:
        VALIDATOR.hidden(encode(torch.zeros(1, 128, HIDDEN))[0])
        with pytest.raises(RequestRejected, match="over the limit of 4096 bytes"):
            VALIDATOR.hidden(encode(torch.zeros(1, 129, HIDDEN))[0])


class TestPositions:
    @pytest.mark.parametrize("rows", [1, 2])
    def test_good_ones_arrive(self, rows: int) -> None:
        ids = torch.tensor([[0, 50, 99]]).repeat(rows, 1)
        assert torch.equal(VALIDATOR.positions(encode_positions(ids), 2, 3), ids)

    @pytest.mark.parametrize("shape", [(3,), (2, 2), (3, 3), (1, 2, 3), ()])
    def test_other_shapes_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(RequestRejected, match=r"position ids have shape .*: expected int32"):
            VALIDATOR.positions(encode(torch.zeros(shape, dtype=torch.int32))[0], 2, 3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
    def test_other_dtypes_are_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(RequestRejected, match="expected int32"):
            VALIDATOR.positions(encode(torch.zeros(2, 3, dtype=dtype))[0], 2, 3)

    def test_pictures_have_axes_where_the_model_has_them(self) -> None:
        ids = torch.arange(18).view(2, 3, 3)
        of_pictures = dataclasses.replace(VALIDATOR, position_axes=3)
        assert torch.equal(of_pictures.positions(encode_positions(ids), 2, 3), ids)
        assert torch.equal(of_pictures.positions(encode_positions(ids[..., 0]), 2, 3), ids[..., 0])
        for validator, wrong in ((VALIDATOR, ids), (of_pictures, ids[..., :2]), (of_pictures, ids[..., None])):
            with pytest.raises(RequestRejected, match="position ids have shape"):
                validator.positions(encode_positions(wrong), 2, 3)

    @pytest.mark.parametrize("ids", [[0, 100], [-1, 5], [2**31 - 1, 0]])
    def test_positions_the_model_does_not_have_are_refused(self, ids: list[int]) -> None:
        with pytest.raises(RequestRejected, match=f"from {min(ids)} to {max(ids)} are outside the model's 100"):
            VALIDATOR.positions(encode_positions(torch.tensor([ids])), 1, 2)

    def test_a_model_without_limit_takes_any_but_negative_ones(self) -> None:
        assert UNLIMITED.positions(encode_positions(torch.tensor([[10**9]])), 1, 1).item() == 10**9
        with pytest.raises(RequestRejected, match="from -1 to -1"):
            UNLIMITED.positions(encode_positions(torch.tensor([[-1]])), 1, 1)

    def test_incomplete_ones_are_refused(self) -> None:
        wire = encode_positions(torch.tensor([[1, 2, 3]]))
        wire.data = wire.data[:-1]
        with pytest.raises(RequestRejected, match="only 11 of 12 bytes"):
            VALIDATOR.positions(wire, 1, 3)


def test_masks_must_cover_all_positions() -> None:
    assert VALIDATOR.mask(pb.AttentionMask(values=b"\x0e"), 2, 2).tolist() == [[0, 1], [1, 1]]
    assert VALIDATOR.mask(pb.AttentionMask(), 1, 3).tolist() == [[1, 1, 1]]
    with pytest.raises(RequestRejected, match="attention mask has 2 bytes"):
        VALIDATOR.mask(pb.AttentionMask(values=b"\0\1"), 2, 3)


def test_length_is_the_models() -> None:
    VALIDATOR.length(100)
    UNLIMITED.length(10**9)
    with pytest.raises(RequestRejected, match="101 positions are more than the model's 100: shorten the prompt"):
        VALIDATOR.length(101)


def test_positions_already_there_count_as_well() -> None:
    wire = encode(torch.zeros(1, 3, HIDDEN))[0]
    assert VALIDATOR.new_positions(wire, past=97).complete
    with pytest.raises(RequestRejected, match="101 positions are more than the model's 100"):
        VALIDATOR.new_positions(wire, past=98)
    with pytest.raises(RequestRejected, match="hidden states have shape"):
        VALIDATOR.new_positions(encode(torch.zeros(200, HIDDEN))[0], past=98)


class TestStepTokens:
    VALIDATOR = dataclasses.replace(VALIDATOR, max_step_tokens=64)

    @pytest.mark.parametrize(("batch_size", "num_tokens"), [(1, 64), (2, 32), (5, 12), (64, 1), (100, 1), (4096, 1)])
    def test_a_chunk_or_one_position_of_any_batch(self, batch_size: int, num_tokens: int) -> None:
        self.VALIDATOR.step_tokens(batch_size, num_tokens)

    @pytest.mark.parametrize(("batch_size", "num_tokens"), [(1, 65), (2, 33), (5, 13), (33, 2), (100, 2)])
    def test_more_must_come_in_several_steps(self, batch_size: int, num_tokens: int) -> None:
        with pytest.raises(RequestRejected) as caught:
            self.VALIDATOR.step_tokens(batch_size, num_tokens)
        assert str(caught.value) == (
            f"a step of {batch_size} × {num_tokens} positions is too long: expected at most 64 in all; "
            "send it in several steps"
        )

    @pytest.mark.parametrize(
        ("batch_size", "num_tokens", "run", "fits"),
        [
            (1, 96, range(96), True),
            (1, 65, range(0), False),
            (1, 64 + 40 + PAGE_TOKENS, range(10, 50), True),
            (1, 64 + 40 + PAGE_TOKENS + 1, range(10, 50), False),
            (2, 32 + 40 + PAGE_TOKENS, range(10, 50), True),
            (1, MAX_JOINED, range(MAX_JOINED), True),
            (1, MAX_JOINED + 1, range(MAX_JOINED + 1), False),
            (2, MAX_JOINED // 2 + 1, range(MAX_JOINED // 2 + 1), False),
        ],
    )
    def test_a_run_cannot_be_cut(self, batch_size: int, num_tokens: int, run: range, fits: bool) -> None:
        joined = torch.zeros(batch_size, num_tokens, dtype=torch.uint8)
        joined[0, run.start : max(run.start, run.stop - 1)] = 1
        with nullcontext() if fits else pytest.raises(RequestRejected, match="is too long"):
            self.VALIDATOR.step_tokens(batch_size, num_tokens, encode(joined)[0])


class TestJoined:
    def test_what_a_client_may_send(self) -> None:
        joined = torch.tensor([[1, 1, 0, 0], [0, 2, 2, 0]], dtype=torch.uint8)
        assert torch.equal(VALIDATOR.joined(encode(joined)[0], 2, 4), joined)

    @pytest.mark.parametrize(
        ("joined", "error"),
        [
            (torch.tensor([[3, 0]], dtype=torch.uint8), "numbered up to 3"),
            (torch.tensor([[0, 1]], dtype=torch.uint8), "0 at the last position"),
            (torch.zeros(1, 3, dtype=torch.uint8), r"have shape \[1, 3\]"),
            (torch.zeros(1, 2, 1, dtype=torch.uint8), "have shape"),
            (torch.zeros(1, 2, dtype=torch.int32), "expected uint8"),
        ],
    )
    def test_what_it_may_not(self, joined: torch.Tensor, error: str) -> None:
        with pytest.raises(RequestRejected, match=error):
            VALIDATOR.joined(encode(joined)[0], 1, 2)

    def test_blocks_that_remember_more_than_keys_and_values(self) -> None:
        with pytest.raises(RequestRejected, match="in order"):
            dataclasses.replace(VALIDATOR, joins=False).joined(encode(torch.zeros(1, 2, dtype=torch.uint8))[0], 1, 2)


class TestRepeatedFields:
    """What may be in a message many times has a bound, checked before anything is done with it."""

    def test_changes(self) -> None:
        VALIDATOR.changes([pb.Change(crop=pb.Crop())] * MAX_CHANGES)
        with pytest.raises(RequestRejected, match="comes with 9 changes: expected at most 8"):
            VALIDATOR.changes([pb.Change()] * (MAX_CHANGES + 1))

    @pytest.mark.parametrize("count", [0, MAX_BATCH_SIZE + 1])
    def test_rows_of_a_reorder(self, count: int) -> None:
        VALIDATOR.changes([pb.Change(reorder=pb.Reorder(indices=[0] * MAX_BATCH_SIZE))])
        with pytest.raises(RequestRejected, match=f"batch size {count} is out of range"):
            VALIDATOR.changes([pb.Change(crop=pb.Crop()), pb.Change(reorder=pb.Reorder(indices=[0] * count))])

    def test_windows_of_stored_positions(self) -> None:
        data = pb.Tensor(dtype=pb.UINT8, shape=[1], size_bytes=1, data=b"x")
        assert VALIDATOR.stored(pb.Stored(num_kept=[1] * MAX_WINDOWS, data=data)).complete
        with pytest.raises(RequestRejected, match="65 kinds of windows: expected at most 64"):
            VALIDATOR.stored(pb.Stored(num_kept=[1] * (MAX_WINDOWS + 1), data=data))

    @pytest.mark.parametrize("shape", [[1] * 100_000, [3] * 9])
    def test_dimensions_are_not_all_repeated_in_the_answer(self, shape: list[int]) -> None:
        wire = pb.Tensor(dtype=pb.FLOAT32, shape=shape)
        for refused in (VALIDATOR.hidden, lambda wire: VALIDATOR.positions(wire, 2, 3)):
            with pytest.raises(RequestRejected) as caught:
                refused(wire)
            assert len(str(caught.value)) < 150

    def test_next_hops(self) -> None:
        known = dict(peer_id="p" * MAX_NAME_CHARS, push_key=bytes(16))
        VALIDATOR.next_hop(pb.NextHop(**known))
        for wrong, sentence in (
            ({"peer_id": "p" * (MAX_NAME_CHARS + 1)}, "513 characters: expected at most 512"),
            ({"push_key": b""}, "the next session's push key has 0 bytes"),
        ):
            with pytest.raises(RequestRejected, match=sentence):
                VALIDATOR.next_hop(pb.NextHop(**{**known, **wrong}))


def test_names_of_strangers_are_shown_on_one_line() -> None:
    wrong = contract(model="other\n12:00:00 \x1b[2Jall is well" + "x" * 1000)
    with pytest.raises(PeerMoved) as caught:
        VALIDATOR.blocks(wrong)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 250
