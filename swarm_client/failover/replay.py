"""What must be replayed to servers that take the place of others in the middle of a session. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    """A step, and the positions it covers. ``reordered``: rows were reordered before."""

    number: int
    start: int
    end: int
    reordered: bool = False


@dataclass(frozen=True)
class Standing:
    """How far a hop is.

    Attributes:
        number: of its last step.
        length: its positions.
        changed_number: its rows came with the changes of steps up to this number in them.
    """

    number: int
    length: int
    changed_number: int = 0


@dataclass(frozen=True)
class Replay:
    """How new hops between two others come to where these are.

    Attributes:
        after_changes: rows come as they are after the reorders and crops that the call begins with.
        history: positions from before the call that are replayed, from the first to before the second.
        resend: steps of the call that the hop before has computed.
        sent_number: what the new hops compute of steps up to this number, nobody else needs.
        changed_number: steps up to this number must not change the rows again.
    """

    after_changes: bool
    history: tuple[int, int]
    resend: tuple[Taken, ...]
    sent_number: int
    changed_number: int


def plan_replay(
    steps: Sequence[Taken], start: int, before: Standing | None, after: Standing | None, answered: int
) -> Replay:
    """Closes the gap between the hops ``before`` and ``after`` with new ones that know nothing.

    Args:
        steps: those of the call in progress, whose first begins with the call's reorders and crops.
        start: the position at which they begin.
        before: None: the client itself, which knows everything.
        after: None: the client, which has the outputs of steps up to ``answered``.
    """
    last = steps[-1]
    if before is None:
        before = Standing(last.number, last.end, last.number)
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
    copy: Standing, steps: Sequence[Taken], start: int, past: Sequence[Taken], before: Standing | None
) -> Replay | None:
    """Closes a gap with a hop that has been a copy of the one that failed, and may lag behind.

    Args:
        past: the last steps before the call.
        start, steps, before: as in ``plan_replay``.

    Returns:
        What the copy has missed; its history has the number before the call's. None if it is too old to be of use.
    """
    first, last = steps[0], steps[-1]
    if before is None:
        before = Standing(last.number, last.end, last.number)
    resend = tuple(step for step in steps if copy.number < step.number <= before.number)
    history = (start, start)
    if past and copy.number < past[-1].number:
        missed = [step for step in past if step.number > copy.number]
        known = [step for step in past if step.number == copy.number]
        reordered = any(step.reordered for step in (*missed, first))
        if not known or reordered:
            return None
        history = (min(start, copy.length, *(step.start for step in missed)), start)
    elif not past and copy.length < start:
        return None
    return Replay(False, history, resend, sent_number=0, changed_number=0)


def gaps(failed: Sequence[bool]) -> list[range]:
    """The maximal runs of failed hops, last first: what comes after a new hop should be there before it."""
    runs: list[range] = []
    for index, is_failed in enumerate(failed):
        if not is_failed:
            continue
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs[::-1]
