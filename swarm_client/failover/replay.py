"""Plans what must be replayed to servers that replace others in the middle of a session. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_protocol.span import runs_without


@dataclass(frozen=True)
class Taken:
    """A step, and the positions it covers. ``reordered``: rows were reordered before the step."""

    number: int
    start: int
    end: int
    reordered: bool = False


@dataclass(frozen=True)
class HopProgress:
    """The progress of one hop.

    Attributes:
        number: the last step that the hop has computed; ``length``: the positions per row after that step.
        changed_number: the rows were opened with the changes of steps up to this number applied.
    """

    number: int
    length: int
    changed_number: int = 0


@dataclass(frozen=True)
class Replay:
    """A plan by which new hops between two others catch up with them.

    Attributes:
        after_changes: whether the replayed rows have the reorders and crops already with which the call begins.
        history: the range of positions from before the call to replay, first included, second excluded.
        resend: the steps of the call that the hop before has computed.
        sent_number: no peer needs the new hops' outputs of steps up to this number.
        changed_number: steps up to this number must not change the rows again.
    """

    after_changes: bool
    history: tuple[int, int]
    resend: tuple[Taken, ...]
    sent_number: int
    changed_number: int


def plan_replay(
    steps: Sequence[Taken], start: int, before: HopProgress | None, after: HopProgress | None, answered: int
) -> Replay:
    """Return the plan for new, empty hops between the hops ``before`` and ``after``.

    Args:
        steps: the steps of the call in progress; the first one begins with the call's reorders and crops.
        start: the position at which the call begins.
        before: the progress of the hop before; None: the client itself, which has all inputs.
        after: the progress of the hop after; None: the client, which has the outputs of steps up to ``answered``.
    """
    last = steps[-1]
    if before is None:
        before = HopProgress(last.number, last.end, last.number)
    changed = max(before.changed_number, before.number)
    sent = answered if after is None else after.number
    return Replay(
        after_changes=changed >= steps[0].number,
        history=(0, start),
        resend=tuple(step for step in steps if step.number <= before.number),
        sent_number=sent,
        changed_number=changed,
    )


def plan_catching_up(
    copy: HopProgress, steps: Sequence[Taken], start: int, past: Sequence[Taken], before: HopProgress | None
) -> Replay | None:
    """Return the plan for a standby replica that takes over from a failed hop, and may lag behind it.

    Args:
        start, steps, before: as in ``plan_replay``.

    Returns:
        The plan for what the replica has missed; the history is one step, numbered before the call's first step. The
        result is None if the replica is too old to be of use.
    """
    first, last = steps[0], steps[-1]
    if before is None:
        before = HopProgress(last.number, last.end, last.number)
    resend = tuple(step for step in steps if copy.number < step.number <= before.number)
    history_start = _missed_from(copy, first, start, past)
    if history_start is None:
        return None
    return Replay(False, (history_start, start), resend, sent_number=0, changed_number=0)


def _missed_from(copy: HopProgress, first: Taken, start: int, past: Sequence[Taken]) -> int | None:
    """Return the first position from before ``start`` that the replica lacks, or ``start``; None: it is too old."""
    if not past:  # the steps that the replica may have missed are not known
        return None if copy.length < start else start
    if copy.number >= past[-1].number:
        return start
    missed = [step for step in past if step.number > copy.number]
    is_known = any(step.number == copy.number for step in past)  # otherwise older steps may have been missed too
    # The history is read from the rows in their present order, and the replica still has the old one.
    if not is_known or any(step.reordered for step in (*missed, first)):
        return None
    return min(start, copy.length, *(step.start for step in missed))


def gaps(failed: Sequence[bool]) -> list[range]:
    """Return the maximal runs of failed hops, last first: hops after a new hop must exist before the new hop."""
    return [range(run.start, run.end) for run in reversed(runs_without([not each for each in failed]))]
