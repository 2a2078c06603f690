"""Outputs that are kept until they may be checked are those of the rows and positions that a session still has."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm_client.adapters.snapshots import NOTHING
from swarm_client.core.config import ClientConfig
from swarm_client.routing.routing import Hop
from swarm_client.verification.checks import SampledAnswer
from swarm_client.verification.session_checks import SessionChecks, _changed
from swarm_client.verification.verdict import CheckVerdict
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.block_input import BlockInput
from tests.unit.support import server_record


@pytest.mark.parametrize("num_cropped", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("reordered", [None, [1, 0], [0], [1, 1, 0]])
def test_they_follow_crops_and_reorders(num_cropped, reordered):
    first, second = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    outputs = _changed([first, second], num_cropped, reordered)
    left = 5 - num_cropped
    if left <= 0:
        assert outputs == []
        return
    (kept,) = outputs
    rows = range(2) if reordered is None else reordered
    for row, origin in enumerate(rows):
        positions = [*first[origin], *second[origin]][:left]
        assert torch.equal(kept[row], torch.stack(positions))


def test_nothing_kept_stays_nothing():
    assert _changed([], 2, [0, 0]) == []


class Checker:
    """Keeps what it is to check, and says always the same of it. None: nothing could be checked."""

    share = 1.0

    def __init__(self, verdict: CheckVerdict | None = None) -> None:
        self.samples: list[SampledAnswer] = []
        self._verdict = verdict

    def start(self) -> None: ...

    def has_new(self, _hops: object) -> bool:
        return True

    def draws(self, *_: Any, **_options: Any) -> bool:
        return False

    def choose(self, rows: Sequence[int]) -> int:
        return rows[0]

    async def check(self, sample: SampledAnswer, *_: Any, **_options: Any) -> CheckVerdict | None:
        self.samples.append(sample)
        return self._verdict


class Swarm:
    config = ClientConfig()


HOPS = tuple(Hop(record, record.span) for record in (server_record("a", "0:4"), server_record("b", "4:8")))


async def test_a_session_that_was_rounded_once_stays_so_until_it_begins_again():
    """Its servers have keys and values of what was rounded."""
    raw, rounding = (pb.RAW,) * 3, (pb.INT8_BLOCKS, pb.RAW, pb.RAW)
    checker, reporter = Checker(), SimpleNamespace(num_repairs=0)
    checks = SessionChecks(Swarm(), reporter)
    checks._checker = checker

    async def step(codecs: tuple[int, ...], length: int) -> None:
        inputs = BlockInput(torch.randn(1, length, 4))
        await checks.accept(HOPS, codecs, lambda _row: inputs, inputs.hidden[:, -8:], 8, length, NOTHING, None)

    await step(raw, 8)
    await step(rounding, 16)
    reporter.num_repairs += 1  # from where on all is raw; nothing of that step is checked
    await step(raw, 24)
    await step(raw, 32)
    checks.begin_again()
    await step(raw, 40)
    assert [sample.codecs for sample in checker.samples] == [raw, rounding, raw, raw]
    assert [sample.is_rounded for sample in checker.samples] == [False, True, True, False]


@pytest.mark.parametrize(
    ("verdict", "is_usable"),
    [
        (CheckVerdict(passed=frozenset("ab")), True),
        (CheckVerdict(unchecked=(Span(0, 8),)), True),  # nobody else has the blocks
        (None, True),
        (CheckVerdict(passed=frozenset("a"), suspects=frozenset("b")), False),
    ],
)
async def test_a_step_is_used_unless_its_check_finds_a_server_to_distrust(
    verdict: CheckVerdict | None, is_usable: bool
) -> None:
    inputs, checker = BlockInput(torch.randn(1, 8, 4)), Checker(verdict)
    checks = SessionChecks(Swarm(), SimpleNamespace(num_repairs=0, report=lambda _event: None))
    checks._checker = checker
    assert (
        await checks.accept(HOPS, (pb.RAW,) * 3, lambda _row: inputs, inputs.hidden, 8, 8, NOTHING, None) == is_usable
    )
    assert len(checker.samples) == 1
