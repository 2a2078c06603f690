"""A run of five volunteers of whom one is always killed or stopped: who hangs, who differs, and what it costs."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from common import json_row
from training_crew import Member, Silent, crew

SIZE = 5
CALL_S, SAMPLES, TARGET = 0.1, 4, 200  # a step of about a second
MOMENTS = ("random", "meeting", "reducing", "stepping", "repairing")
SIGNALS = ("SIGKILL", "SIGSTOP")
HANG_S = 60.0
DEADLINE_S = 5.0  # `straggler_s`, the default
TASK = {"call_s": CALL_S, "jitter": 0.3, "samples": SAMPLES, "target": TARGET}


@dataclass
class Tally:
    """Attributes:
    lost_s: by signal, how much longer than usual the longest of the next steps took.
    hangs: failures after which some survivor took no step within ``HANG_S``.
    different: steps after which survivors, or one that was stopped and has come back, had different parameters.
    """

    lost_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SIGNALS})
    hangs: list[str] = field(default_factory=list)
    different: int = 0


def failures(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows for so many failures; after a hang, a new run goes on with the rest."""
    chance = random.Random(seed)
    plan = [(MOMENTS[number % len(MOMENTS)], SIGNALS[number % 2]) for number in range(count)]
    tally = Tally()
    while plan:
        with crew("training_volunteer.py", [{}] * SIZE, **TASK) as members:
            for member in members:
                member.order("go")
            while plan:
                moment, name = plan.pop(0)
                try:
                    _fail(members, moment, name, chance, tally)
                except Silent as error:
                    tally.hangs.append(f"{moment}, {name}: {error}")
                    break
    rows = [
        json_row(f"hangs after {count} failures", len(tally.hangs), 0, at_most=True, hangs=tally.hangs),
        json_row("steps after which survivors differ", tally.different, 0, at_most=True),
    ]
    for name, lost_s in tally.lost_s.items():
        if lost_s:
            row = json_row(f"most time lost after {name}, s", max(lost_s), DEADLINE_S, at_most=True)
            rows.append(row | {"median": statistics.median(lost_s), "lost_s": lost_s})
    return rows


def _fail(members: list[Member], moment: str, name: str, chance: random.Random, tally: Tally) -> None:
    """One failure, until all are there again. A failure of a repair needs another one before it.

    Raises:
        Silent: a survivor, or who has come back or is new, takes no step.
    """
    usual_s = _all_together(members)
    victims = chance.sample(members, 2 if moment == "repairing" else 1)
    survivors = [member for member in members if member not in victims]
    if moment == "random":
        time.sleep(chance.uniform(0, usual_s))
        victims[0].send_signal(getattr(signal, name))
    else:
        victims[0].order("strike", moment=moment, signal=name)
        if moment == "repairing":
            victims[1].order("strike", moment="reducing as led", signal="SIGKILL")  # a leader's death ends the meeting
        for victim in victims:
            victim.next("struck", HANG_S)
    for member in members:
        member.catch_up()
    before = max(max(member.steps(), default=0) for member in survivors)
    for member in survivors:
        member.reach(before + 3, HANG_S)
    _judge(survivors, before, usual_s, tally, name)
    stopped = victims[:1] if name == "SIGSTOP" else []
    for victim in stopped:
        victim.send_signal(signal.SIGCONT)
        back = victim.reach(before + 4, HANG_S)
        tally.different += survivors[0].reach(back["step"], HANG_S)["digest"] != back["digest"]
    peers = survivors[0].joined()["peers"]
    for victim in (victim for victim in victims if victim not in stopped):
        victim.kill()
        members.remove(victim)
        number = 1 + max(member.number for member in members)
        members.append(Member("training_volunteer.py", number=number, peers=peers, **TASK))
        members[-1].joined()
        members[-1].order("go")


def _all_together(members: Sequence[Member]) -> float:
    """Waits until all take a step as one group; returns the median of what the last steps took, in seconds."""
    watcher = members[0]
    watcher.catch_up()
    deadline_s = time.monotonic() + HANG_S
    while len((said := watcher.next("step", deadline_s - time.monotonic()))["members"]) < SIZE:
        pass
    for member in members:
        member.reach(said["step"], HANG_S)
    ends_s = [each["at_s"] for _, each in sorted(watcher.steps().items())][-6:]
    return statistics.median(_differences(ends_s)) if len(ends_s) > 1 else 1.0


def _judge(survivors: Sequence[Member], before: int, usual_s: float, tally: Tally, name: str) -> None:
    steps = [member.steps() for member in survivors]
    for step in range(before, before + 4):
        tally.different += len({each[step]["digest"] for each in steps if step in each}) > 1
    ends_s = [max(each[step]["at_s"] for each in steps if step in each) for step in range(before, before + 4)]
    tally.lost_s[name].append(max(max(_differences(ends_s)) - usual_s, 0.0))


def _differences(times_s: Sequence[float]) -> list[float]:
    return [later - sooner for sooner, later in pairwise(times_s)]
