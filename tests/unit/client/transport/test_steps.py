"""How inputs are cut into steps: nothing is lost or doubled, and each step fits every hop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.transport.steps import OutgoingStep, chunk_size, in_messages, may_be_resent, split
from swarm_client.transport.wire_tensor import WireTensor
from swarm_protocol.errors import RequestRejected
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import IN_WINDOWS, BlockInput
from swarm_protocol.wire.codec import decode, decode_mask
from swarm_protocol.wire.constants import MAX_JOINED, MAX_RESENT, MAX_RESENT_STEPS, MIB, PAGE_TOKENS, PART_BYTES

UNLIMITED = 1 << 31  # of a hop that must be given a prompt in one piece
START, NUMBER, BATCH, NEW, HIDDEN = 3, 40, 2, 10, 4
CROP = pb.Change(crop=pb.Crop(length=START))


# ---------------------------------------------------------------- how large steps are


@pytest.mark.parametrize(
    ("num_tokens", "batch_size", "limits", "num_slow_links", "size"),
    [
        (1000, 1, [64], 0, 64),
        (1000, 1, [100], 0, 96),  # whole pages
        (1000, 1, [20], 0, 20),  # less than one
        (1000, 3, [64], 0, 21),
        (1000, 4, [2], 0, 1),
        (1024, 1, [512, 512], 0, 128),  # 4 for each of two hops
        (1024, 1, [512, 64], 0, 64),
        (1024, 2, [512, 512, 512], 0, 96),  # 1024 / 12, in whole pages
        (7, 1, [512, 512], 0, 32),
        (5000, 2, [UNLIMITED], 0, UNLIMITED // 2),
        (5000, 1, [UNLIMITED, UNLIMITED], 0, UNLIMITED),
        (5000, 1, [UNLIMITED, 256], 0, 256),
        (1024, 1, [1024], 1, 128),  # slow links are stages of the pipeline too
        (1024, 1, [1024, 1024], 1, 96),
        (1024, 1, [UNLIMITED], 1, UNLIMITED),
    ],
)
def test_how_many_positions_a_step_has(
    num_tokens: int, batch_size: int, limits: list[int], num_slow_links: int, size: int
) -> None:
    assert chunk_size(num_tokens, batch_size, limits, num_slow_links) == size


@given(st.integers(1, 5000), st.integers(1, 8), st.lists(st.integers(8, 4096), min_size=1, max_size=6))
def test_a_step_fits_every_hop_and_is_of_whole_pages(num_tokens: int, batch_size: int, limits: list[int]) -> None:
    size = chunk_size(num_tokens, batch_size, limits)
    assert 1 <= size * batch_size <= min(limits)
    assert size < PAGE_TOKENS or size % PAGE_TOKENS == 0


# ---------------------------------------------------------------- what is in them


def cut(inputs: BlockInput, size: int, **options: object) -> list[OutgoingStep]:
    return split(inputs, start=START, number=NUMBER, size=size, codec=pb.RAW, **options)


def hidden_of(step: OutgoingStep) -> torch.Tensor:
    return WireTensor(step.message.hidden, step.parts).decode(step.message.hidden.shape, torch.float32)


@pytest.mark.parametrize("size", [1, 3, 5, 9, 10, 100])
def test_together_they_are_the_inputs(size: int) -> None:
    mask = torch.randint(0, 2, (BATCH, START + NEW))
    mask[:, 0] = 0
    positions = torch.randint(0, 99, (BATCH, NEW))
    inputs = BlockInput(torch.randn(BATCH, NEW, HIDDEN), mask, positions)
    steps = cut(inputs, size)
    assert len(steps) == -(-NEW // size)
    assert [step.number for step in steps] == list(range(NUMBER, NUMBER + len(steps)))
    assert [step.start for step in steps] == list(range(START, START + NEW, size))
    assert [step.end for step in steps] == [*(step.start for step in steps[1:]), START + NEW]
    assert sum(step.num_positions for step in steps) == BATCH * NEW
    assert [step.message.following_tokens for step in steps] == [START + NEW - step.end for step in steps]
    assert torch.equal(torch.cat([hidden_of(step) for step in steps], 1), inputs.hidden)
    assert torch.equal(torch.cat([decode(step.message.position_ids).long() for step in steps], 1), positions)
    for step in steps:  # over everything so far
        assert torch.equal(decode_mask(step.message.attention_mask, BATCH, step.end), mask[:, : step.end])


def test_what_does_not_come_with_the_inputs_is_not_sent() -> None:
    for step in cut(BlockInput(torch.randn(BATCH, NEW, HIDDEN)), 4):
        assert not step.message.HasField("attention_mask") and not step.message.HasField("position_ids")


@pytest.mark.parametrize("size", [1, 3, 10])
@pytest.mark.parametrize("num_wanted", range(NEW + 1))
def test_the_last_outputs_are_wanted(num_wanted: int, size: int) -> None:
    steps = cut(BlockInput(torch.randn(BATCH, NEW, HIDDEN)), size, num_wanted=num_wanted)
    wanted = [position for step in steps for position in range(step.end - step.message.outputs_wanted, step.end)]
    assert wanted == list(range(START + NEW))[START + NEW - num_wanted :]
    assert all(step.message.HasField("outputs_wanted") for step in steps)  # absent, it would mean all


def test_rows_change_before_the_first_step() -> None:
    steps = cut(BlockInput(torch.randn(BATCH, NEW, HIDDEN)), 4, changes=[CROP], every_block=True)
    assert [list(step.message.changes) for step in steps] == [[CROP], [], []]
    assert all(step.message.every_block for step in steps)


def test_large_hidden_states_have_further_parts() -> None:
    inputs = BlockInput(torch.randn(1, 3, PART_BYTES // 4))
    (step,) = cut(inputs, 3)
    assert [len(step.message.hidden.data), *map(len, step.parts)] == [PART_BYTES] * 3
    assert torch.equal(hidden_of(step), inputs.hidden)


def test_a_step_for_another_hop_has_other_hidden_states() -> None:
    step, _ = cut(BlockInput(torch.randn(BATCH, NEW, HIDDEN)), 5, changes=[CROP], num_wanted=1)
    before, output = hidden_of(step), torch.randn(BATCH, 5, HIDDEN)
    relayed = step.with_hidden(WireTensor.of(output))
    assert torch.equal(hidden_of(relayed), output) and torch.equal(hidden_of(step), before)
    relayed.message.hidden.CopyFrom(step.message.hidden)
    assert relayed.message == step.message


def test_a_step_without_data_keeps_everything_else() -> None:
    step, _ = cut(BlockInput(torch.randn(BATCH, NEW, HIDDEN)), 5, changes=[CROP], num_wanted=1)
    bare, data = step.without_data(), step.message.hidden.data
    assert data and not bare.hidden.data
    bare.hidden.data = data
    assert bare == step.message


# ---------------------------------------------------------------- positions that attend to later ones


def with_runs(length: int, *runs: range, rows: int = 1) -> torch.Tensor:
    joined = torch.zeros(rows, length, dtype=torch.uint8)
    for run in runs:
        joined[-1, run.start : run.stop - 1] = IN_WINDOWS
    return joined


@pytest.mark.parametrize(
    ("start", "size", "runs", "ends"),
    [
        (0, 64, [range(10, 266)], [288, 300]),  # at the end of the page
        (0, 64, [range(10, 266), range(270, 290)], [266, 300]),  # in which the next one has begun
        (0, 64, [range(64, 128)], [64, 128, 192, 256, 300]),
        (5, 64, [range(10, 266)], [283, 300]),  # of the session's pages
        (0, 64, [range(30, 300)], [300]),
        (0, 512, [range(10, 266)], [300]),
        (0, 4, [range(2, 5), range(5, 8)], [5, 9, *range(13, 300, 4), 300]),
    ],
)
def test_a_run_is_not_cut(start: int, size: int, runs: list[range], ends: list[int]) -> None:
    joined = with_runs(300, *runs, rows=2)
    inputs = BlockInput(torch.randn(2, 300, 1), joined=joined)
    steps = split(inputs, start=start, number=1, size=size, codec=pb.RAW)
    assert [step.end - start for step in steps] == ends
    assert [step.start for step in steps] == [start, *(step.end for step in steps[:-1])]
    sent = [decode(step.message.joined) if step.message.HasField("joined") else None for step in steps]
    parts = torch.cat(
        [torch.zeros(2, s.end - s.start) if j is None else j for s, j in zip(steps, sent, strict=True)], 1
    )
    assert torch.equal(parts, joined.float())
    assert all(part is None or part.any() for part in sent)
    assert all(step.fits(2 * size) for step in steps)


def test_a_run_that_no_step_may_have_is_refused() -> None:
    inputs = BlockInput(
        torch.zeros(3, MAX_JOINED // 3 + 1, 1),
        joined=with_runs(MAX_JOINED // 3 + 1, range(MAX_JOINED // 3 + 1), rows=3),
    )
    with pytest.raises(RequestRejected, match="use fewer rows or a smaller picture"):
        split(inputs, start=0, number=1, size=64, codec=pb.RAW)


# ---------------------------------------------------------------- what a server is to send again


@pytest.mark.parametrize(
    ("num_steps", "mask_bytes", "counts"),
    [
        (0, 0, []),
        (1, 0, [1]),
        (MAX_RESENT, 0, [MAX_RESENT]),
        (2 * MAX_RESENT + 1, 0, [MAX_RESENT, MAX_RESENT, 1]),
        (3, MIB // 2 - 100, [2, 1]),
        (3, MIB // 2, [1, 1, 1]),
    ],
)
def test_steps_to_be_resent_travel_in_messages(num_steps: int, mask_bytes: int, counts: list[int]) -> None:
    mask = pb.AttentionMask(values=bytes(mask_bytes))
    steps = [pb.Step(number=number, attention_mask=mask) for number in range(num_steps)]
    messages = list(in_messages(steps))
    assert list(map(len, messages)) == counts
    assert [step for message in messages for step in message] == steps


def test_very_many_are_not_resent() -> None:
    assert may_be_resent([pb.Step()] * MAX_RESENT_STEPS)
    assert not may_be_resent([pb.Step()] * (MAX_RESENT_STEPS + 1))
    large = pb.Step(attention_mask=pb.AttentionMask(values=bytes(MIB // 2)))
    assert may_be_resent([large] * 120) and not may_be_resent([large] * 129)


def test_a_prompt_of_32k_positions_can_be_resent() -> None:
    tokens, chunk = 32 * 1024, 64
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, :7] = 0
    inputs = BlockInput(torch.zeros(2, tokens, 1), mask, torch.arange(tokens)[None].expand(2, -1))
    steps = [step.without_data() for step in split(inputs, start=0, number=1, size=chunk // 2, codec=pb.RAW)]
    assert len(steps) == 1024 and may_be_resent(steps)
    assert max(pb.RerouteRequest(resend=message).ByteSize() for message in in_messages(steps)) <= PART_BYTES + 1000


@pytest.mark.parametrize(
    ("positions", "sent"), [([[START]], False), ([[START], [START]], False), ([[START - 1]], True)]
)
def test_the_position_of_one_token_is_sent_if_it_does_not_count_on(positions: list[list[int]], sent: bool) -> None:
    (step,) = cut(BlockInput(torch.randn(len(positions), 1, HIDDEN), None, torch.tensor(positions)), 9)
    assert step.message.HasField("position_ids") is sent
