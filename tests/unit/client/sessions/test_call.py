"""What has become of a call's steps: how far it is answered, and its outputs whatever order they come in."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from swarm_client.failover.journal import Journal
from swarm_client.failover.replay import Taken
from swarm_client.sessions.call import SessionCall
from swarm_client.transport.steps import split
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.block_input import BlockInput
from swarm_protocol.wire.constants import FIRST_STEP

PAST, NEW, SIZE, HIDDEN = 5, 10, 4, 3  # steps of 4, 4 and 2 positions
FIRST = FIRST_STEP + 7
NUMBERS = [FIRST, FIRST + 1, FIRST + 2]
REORDER = pb.Change(reorder=pb.Reorder(indices=[1, 0]))
CROP = pb.Change(crop=pb.Crop(length=PAST))


def block_input(num_tokens: int) -> BlockInput:
    return BlockInput(torch.randn(2, num_tokens, HIDDEN))


def call_of(num_wanted: int = NEW, changes: tuple[pb.Change, ...] = (), watched: range = range(0)) -> SessionCall:
    inputs = block_input(NEW)
    before = Journal.empty(2).appended(block_input(PAST))
    after = before.copy().appended(inputs)
    steps = split(inputs, start=PAST, number=FIRST, size=SIZE, codec=pb.RAW, changes=changes, num_wanted=num_wanted)
    return SessionCall(inputs, num_wanted, before, after, changes, steps, watched=watched)


def answer(call: SessionCall, number: int) -> None:
    """As servers that compute 2 x + 1 would; those that nobody wants are not sent."""
    step = call.step(number)
    assert step is not None
    output = 2 * call.inputs.hidden[:, step.start - PAST : step.end - PAST] + 1
    wanted = step.message.outputs_wanted
    call.outputs[number] = output[:, -wanted:] if wanted else None


@pytest.mark.parametrize("order", list(permutations(NUMBERS)))
def test_it_is_answered_as_far_as_nothing_is_missing(order: tuple[int, ...]) -> None:
    call, come = call_of(), set()
    assert call.answered == FIRST - 1 and not call.complete
    for number in order:
        answer(call, number)
        come.add(number)
        assert call.answered == max(n for n in (FIRST - 1, *NUMBERS) if come.issuperset(range(FIRST, n + 1)))
        assert call.complete == (len(come) == 3)


@pytest.mark.parametrize("num_wanted", range(1, NEW + 1))
def test_the_output_is_of_the_last_positions_in_their_order(num_wanted: int) -> None:
    call = call_of(num_wanted)
    for number in reversed(NUMBERS):
        answer(call, number)
    assert torch.equal(call.output(), (2 * call.inputs.hidden + 1)[:, -num_wanted:])


def test_it_is_complete_once_all_watched_blocks_have_answered() -> None:
    call = call_of(watched=range(2, 4))
    for number in NUMBERS:
        answer(call, number)
    expected = {block: torch.randn(2, NEW, HIDDEN) for block in call.watched}
    for number in reversed(NUMBERS):
        for block, output in expected.items():
            assert not call.complete
            step = call.step(number)
            call.block_outputs[block, number] = output[:, step.start - PAST : step.end - PAST]
    assert call.complete
    assert all(torch.equal(call.output_of(block), output) for block, output in expected.items())
    call.forget_outputs()
    assert not call.complete and call.answered == FIRST - 1


def test_a_call_that_is_not_cut_yet_is_not_complete() -> None:
    call = call_of()
    call.steps = []
    assert not call.complete


def test_it_knows_its_own_steps_alone() -> None:
    call = call_of()
    assert call.step(FIRST - 1) is call.step(FIRST + 3) is None


@pytest.mark.parametrize(
    ("changes", "reordered"), [((), False), ((CROP,), False), ((REORDER,), True), ((CROP, REORDER), True)]
)
def test_only_its_first_step_reorders_rows(changes: tuple[pb.Change, ...], reordered: bool) -> None:
    assert call_of(changes=changes).taken == [
        Taken(FIRST, 5, 9, reordered),
        Taken(FIRST + 1, 9, 13),
        Taken(FIRST + 2, 13, 15),
    ]
