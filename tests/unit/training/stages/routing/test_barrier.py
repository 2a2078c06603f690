"""When a stage may step, goes back with others, or is stranded; what a run looks like from its records."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_protocol.codecs.bitmap import to_bits
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.routing.barrier import (
    global_squared_norm,
    is_stranded,
    may_step,
    skipped_batches,
    went_back_to,
)
from swarm_training.stages.routing.run_stages import RunStages

NOW = Moment(0, 5)


def stages(*text: str) -> RunStages:
    """A stage is a list of peers: ``5`` is at step 5, ``5h`` holds its average, ``5b`` has micro-batches, ``1/3`` is at
    step 3 after one rollback. ``5=2`` tells the squared norm of its average, ``5~2`` that of all which led there."""

    def member(number: int, each: str) -> Progress:
        each, _, total = each.partition("~")
        each, _, norm = each.partition("=")
        norms: Any = {
            "squared_norm": (float(norm),) if norm else (),
            "global_squared_norm": float(total) if total else None,
        }
        rollbacks, _, step = each.rstrip("hb").rpartition("/")
        bits, decided = b"\x01" if "b" in each else b"\0", b"d" if "h" in each else b""
        where: Any = {"rollbacks": int(rollbacks or 0), "step": int(step)}
        return Progress("toy/0", f"p{number}", micro_batches=bits, decided=decided, **where, **norms)

    return RunStages(tuple(tuple(member(number, each) for number, each in enumerate(one.split())) for one in text))


@pytest.mark.parametrize(
    ("seen", "may"),
    [
        (["5h 5h", "5h", "5h"], True),
        (["5h", "5h", "5"], False),
        (["5h", "5h", ""], False),  # nobody is known there
        (["5h", "5h 5b", "5h"], False),  # should the first die, the second could not go on
        (["5h", "5h 5", "5h 4"], True),  # who has just joined, or is behind, has nothing to lose
        (["5h", "5", "6"], True),  # it was open when all of a stage went through
        (["5h", "5b", "5 5 6"], False),  # a single peer may say what it likes
        (["5h 5h 6", "5", "5h"], False),
        (["5h 5h", "5 6", "5h"], False),
        (["5h 5h", "5b 6 6", "5"], True),  # most of a stage went through
        (["5h 5h", "5h 6", "5h"], True),
        (["5h", "5", "6 4"], True),  # who lags behind may do so for long
        (["5h", "5", "1/6"], False),  # that is another way
        ([], False),
    ],
)
def test_all_stages_step_together(seen: list[str], may: bool) -> None:
    assert may_step(stages(*seen), NOW) == may


@pytest.mark.parametrize(
    ("seen", "moment"),
    [
        (["5", "5", "5 6"], None),
        (["5", "1/4", "5"], Moment(1, 4)),
        (["5", "5", "5 1/4"], None),  # one of two
        (["5", "5", "5 1/4 1/4"], Moment(1, 4)),
        (["5", "1/4", "1/4 1/5 1/5"], Moment(1, 4)),
        (["5", "1/4", "2/2"], Moment(2, 2)),
    ],
)
def test_a_rollback_of_one_stage_is_one_of_all(seen: list[str], moment: Moment | None) -> None:
    assert went_back_to(stages(*seen), NOW) == moment


@pytest.mark.parametrize(
    ("claims", "number"),
    [
        ([[0, 0], [3, 3]], 3),
        ([[0, 0], [3]], 3),
        ([[0, 0], [3, 0]], 3),  # one has decided it, and the other one does not know yet
        ([[3], [3, 3, 900]], 3),  # a single peer may say what it likes
        ([[3, 3, 3, 900], []], 3),
        ([], 0),
    ],
)
def test_half_of_a_stage_say_how_many_batches_are_skipped(claims: list[list[int]], number: int) -> None:
    records = [[Progress("toy/0", "p", skipped_batches=claim) for claim in stage] for stage in claims]
    assert skipped_batches(records) == number


@pytest.mark.parametrize(
    ("seen", "stranded"),
    [
        (["5 5", "6 6", "5"], True),
        (["5 5h", "6", "6"], False),
        (["5 6", "6", "6"], False),
        (["5", "5h", "5h"], False),
        (["5", "6 5 5", "5"], False),  # a single peer may say what it likes
    ],
)
def test_a_stage_is_stranded_if_others_have_left_it_behind(seen: list[str], stranded: bool) -> None:
    assert is_stranded(stages(*seen), 0, NOW) == stranded


@pytest.mark.parametrize(
    ("seen", "norm"),
    [
        (["5=1", "5=2 5=2", "5=4"], 7.0),
        (["5=1", "5=2 5", "5=4"], 7.0),
        (["5=1", "5 5", "5=4"], None),  # the second stage has not told it yet
        (["5=1", "6=2", "5=4"], None),  # that is of another step
        (["5=1", "6~7", "6~7 6=9"], 7.0),  # who has stepped tells the sum
        (["5=1", "7~9", "4~3 1/6~2"], None),
        (["5=1", "5=2 5=2 5=900", "5=4"], 7.0),  # one lies
        (["5=1", "5=2 5=3", "5=4"], 8.0),
        (["5=1", "6~7 6~7 6~900", ""], 7.0),
        (["5=1", "5=inf", "5=4"], float("inf")),
        ([], None),
    ],
)
def test_the_norm_is_that_of_all_stages_averages(seen: list[str], norm: float | None) -> None:
    assert global_squared_norm(stages(*seen), NOW) == norm


def record(name: str, model: bytes = b"m", **fields: Any) -> Progress:
    values = {"target_batch_size": 8, "micro_batches": to_bits((), 8), "model": model}
    return Progress("toy/0", name, **values | fields)


def test_a_view_is_made_of_records() -> None:
    odd, counting = record("x", b"another"), record("y", micro_batches=b"", samples=3)
    decided = record("a", step=2, micro_batches=to_bits({1, 7}, 8), samples=2, decided=b"d", samples_per_s=3.0)
    view = RunStages.of([[record("b"), decided, odd, counting], [record("c", step=1)]])
    assert view.num_micro_batches == 8 and view.moment == Moment(0, 1)
    assert [peer.peer_id for peer in view.stages[0]] == ["a", "b"]
    assert view.stages[0][0] == decided
    assert RunStages.of([[record("b")], []]).moment is None and RunStages.of([]).num_micro_batches == 0
