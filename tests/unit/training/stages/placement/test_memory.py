"""What a stage is said to need grows with its parameters, and what is left is shared out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from swarm_protocol.wire.constants import MIB
from swarm_training.runfile.memory import PROCESS_BYTES
from swarm_training.runfile.settings import LocalSettings
from swarm_training.stages.placement.memory import StageNeeds, StageRoom, room_of

NEEDS = StageNeeds(num_trained=40 << 20, other_bytes=0, optimizer="adamw", sums="fp32", request_bytes=8 * MIB)


@pytest.mark.parametrize(
    ("optimizer", "sums", "expected"),  # as the documentation has it
    [
        ("adamw", "fp32", (20, 28)),
        ("adamw", "fp64", (28, 44)),
        ("sgd", "fp32", (12, 20)),
        ("adamw8bit", "fp32", (14.1, 22.1)),
    ],
)
def test_bytes_per_parameter(optimizer: str, sums: str, expected: tuple[float, ...]) -> None:
    needs = replace(NEEDS, optimizer=optimizer, sums=sums)
    assert (needs.resting_bytes, needs.stepping_bytes) == pytest.approx(expected)
    averaged = replace(needs, is_averaged=True)
    assert (averaged.resting_bytes, averaged.stepping_bytes) == pytest.approx((expected[0] + 4, expected[1] + 4))
    assert replace(needs, is_shared=True).stepping_bytes == pytest.approx(expected[1] + 4)
    more = replace(needs, num_trained=2 * needs.num_trained, other_bytes=100)
    assert more.needed_bytes - needs.needed_bytes - 100 == pytest.approx(needs.num_trained * expected[-1], abs=2)


@pytest.mark.parametrize(
    ("momentum", "keeps_errors", "expected"), [(0.0, False, (24, 32)), (0.9, False, (28, 36)), (0.0, True, (40, 48))]
)
def test_bytes_per_parameter_with_local_steps(momentum: float, keeps_errors: bool, expected: tuple[float, ...]) -> None:
    """Beside the inner optimizer's states there are the shared weight, and in checkpoints only the outer one's."""
    local = LocalSettings(batch_size=8, outer_momentum=momentum)
    needs = replace(NEEDS, local=local, keeps_errors=keeps_errors)
    assert (needs.resting_bytes, needs.stepping_bytes) == expected
    said = needs.described(room_of(needs, 16384 * MIB), 3)
    checkpoint = 320 if momentum else 160
    assert f"the weights that all share 160MiB{', the outer optimizer 160MiB' if momentum else ''}" in said
    assert f"3 checkpoints of {checkpoint}MiB each" in said and ("errors of encoding 640MiB" in said) == keeps_errors


def test_without_a_limit_as_much_is_kept_as_is_of_use() -> None:
    assert room_of(NEEDS, None) == StageRoom(2 * 160 * MIB, 512 * MIB, 1024 * MIB)
    assert room_of(replace(NEEDS, num_trained=1 << 20), None).pending == 16 * 4 * MIB
    assert room_of(replace(NEEDS, request_bytes=2048 * MIB), None).requests == 2048 * MIB


def test_what_is_held_is_described_and_bounded_by_the_limit() -> None:
    limit = 8192 * MIB
    needs = replace(NEEDS, is_averaged=True)
    said = needs.described(room_of(needs, limit), 3)
    assert said.startswith("up to ") and int(said.removeprefix("up to ").partition("MiB")[0]) <= limit // MIB
    for part in ("weights 160MiB", "optimizer 320MiB", "average of the weights 160MiB", "3 checkpoints of 640MiB each"):
        assert part in said
    sizes = [int(size) for size in re.findall(r" (\d+)MiB", said.partition(";")[0])]
    assert sizes[0] == pytest.approx(sum(sizes[1:]), abs=len(sizes))


@pytest.mark.parametrize("num_rooms", [1, 2])  # of requests: auditors have one of their own
def test_what_is_left_of_the_memory_is_shared_out_and_never_exceeded(num_rooms: int) -> None:
    needs = replace(NEEDS, num_rooms=num_rooms)
    least = PROCESS_BYTES + 28 * needs.num_trained + needs.gradient_bytes + num_rooms * needs.request_bytes
    assert room_of(needs, least) == StageRoom(needs.gradient_bytes, 0, needs.request_bytes)
    for memory in range(least, least + 8192 * MIB, 100 * MIB):
        room = room_of(needs, memory)
        assert needs.needed_bytes + room.pending + room.kept + num_rooms * room.requests <= memory
        assert room.pending >= needs.gradient_bytes and room.requests >= needs.request_bytes
    said = re.escape(f"--memory is 1024MiB: expected at least {least // MIB}MiB for a stage with 41943040 parameters")
    with pytest.raises(ValueError, match=said + ".* takes 32 bytes with adamw"):
        room_of(needs, 1 << 30)
    with pytest.raises(ValueError, match="--memory is"):
        room_of(needs, least - 1)
