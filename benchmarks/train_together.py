"""Peers that train together: how long averaging takes, what unequal speeds and codecs cost, and what failures do.

    python benchmarks/train_together.py [--rounds 3] [--steps 50] [--failures 40] [--seed 1] [--only PART …] [--quick]
                                        [--json FILE]

Processes on loopback, one thread each. `averaging`: seconds from the last arrival to the last result, beside hivemind's
averager, which is told the size of the group. `groups`: the share of steps in which all took part, although nobody told
them how many they are and their speeds vary. `speeds`: samples per second of four peers of speeds 1:1:2:4, beside the
sum of their speeds. `loss`: beside one process that takes the same samples in the same steps. `failures`:
kill -9 and SIGSTOP at random moments.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import json_row, median_ratio, table_of, take_turns, write_json
from compression import LanguageModel, batch
from rich.console import Console
from training_crew import Member, crew
from training_failures import failures
from training_volunteer import BATCHES, held_out_loss

PEERS = 4
VOLUNTEER, HIVEMIND = "training_volunteer.py", "hivemind_averager.py"
SPEEDS = 1, 1, 2, 4
AVERAGING_TARGET, GROUPS_TARGET, SPEEDS_TARGET, LOSS_TARGET = 0.8, 0.98, 0.9, 1.01
STEP_S = 120.0  # at most, for whatever is waited for
BESIDE = {"fp32": "hivemind fp32", "fp16": "hivemind fp16", "int8": "hivemind fp16"}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        parameters, averagings: of the vectors, and in each turn of a contestant.
        step_s: a step takes at the sum of the speeds.
        loss_steps: global steps until losses are compared.
    """

    rounds: int
    parameters: int
    averagings: int
    group_steps: int
    speed_steps: int
    step_s: float
    loss_steps: int
    failures: int


QUICK = Scale(1, 2_000_000, 3, 15, 4, 4.0, 10, 4)


def averaging(scale: Scale) -> Rows:
    """A turn is four new processes, and the median of their averagings."""
    wrong = dict.fromkeys(["fp32", "hivemind fp32", "fp16", "hivemind fp16", "int8"], 0)

    def turn(name: str) -> float:
        is_ours = not name.startswith("hivemind")
        codec = name.split()[-1]
        task: dict[str, Any] = {"size": scale.parameters}
        task |= {"config": {"codec": codec}} if is_ours else {"codec": codec, "group_size": PEERS}
        with crew(VOLUNTEER if is_ours else HIVEMIND, [{}] * PEERS, **task) as members:
            taken = [_average(members) for _ in range(scale.averagings + 1)][1:]  # the first warms up
        right = [seconds for seconds, is_right in taken if is_right]
        wrong[name] += len(taken) - len(right)
        return statistics.median(right) if right else float("nan")

    def contestant(name: str) -> Callable[[], float]:
        return lambda: turn(name)

    measured = take_turns(scale.rounds, {name: contestant(name) for name in wrong})
    rows = []
    for codec, other in BESIDE.items():
        seconds, beside = measured[codec], measured[other]
        rows.append(
            json_row(
                f"averaging {scale.parameters / 1e6:g} M parameters in {codec}, s (beside {other})",
                statistics.median(seconds),
                AVERAGING_TARGET,
                beside=statistics.median(beside),
                ratio=median_ratio(seconds, beside),
                at_most=True,
                turns=seconds,
                turns_beside=beside,
                wrong=wrong[codec],
                wrong_beside=wrong[other],
            )
        )
    return rows


def _average(members: list[Member]) -> tuple[float, bool]:
    """Seconds from the last arrival to the last result, and whether that is the mean of all."""
    for member in members:
        member.order("once")
    said = [member.next("averaged", STEP_S) for member in members]
    mean = statistics.mean(member.number for member in members)
    is_right = all(abs(each["mean"] - mean) < 0.01 for each in said)
    return max(each["got_s"] for each in said) - max(each["arrived_s"] for each in said), is_right


def _train(members: list[Member], steps: int) -> None:
    for member in members:
        member.order("go")
    for member in members:
        member.next("done", STEP_S + steps * STEP_S / 10)


def groups(scale: Scale) -> Rows:
    """Calls take between half and one and a half times 0.1 s, or twice or three times that."""
    tasks = [{"call_s": call_s} for call_s in (0.1, 0.1, 0.2, 0.3)]
    with crew(VOLUNTEER, tasks, jitter=0.5, samples=4, target=120, steps=scale.group_steps) as members:
        _train(members, scale.group_steps)
        said = {step: event for member in members for step, event in member.steps().items()}
    full = sum(len(event["members"]) == PEERS for event in said.values())
    name = f"full groups in {scale.group_steps} steps, share"
    return [json_row(name, full / scale.group_steps, GROUPS_TARGET)]


def speeds(scale: Scale) -> Rows:
    calls_s = [0.2 / speed for speed in SPEEDS]
    sum_of_speeds = sum(4 / call_s for call_s in calls_s)
    tasks = [{"call_s": call_s} for call_s in calls_s]
    target = round(sum_of_speeds * scale.step_s)
    with crew(VOLUNTEER, tasks, samples=4, target=target, steps=scale.speed_steps) as members:
        _train(members, scale.speed_steps)
        steps = [member.steps() for member in members]
    samples = sum(4 * said["calls"] for each in steps for step, said in each.items() if step > 1)
    ends_s = [max(each[step]["at_s"] for each in steps if step in each) for step in (1, scale.speed_steps)]
    together = samples / (ends_s[1] - ends_s[0])
    name = f"peers of speeds 1:1:2:4, steps of {scale.step_s:g} s, samples/s"
    return [json_row(name, together, SPEEDS_TARGET, beside=sum_of_speeds, ratio=together / sum_of_speeds)]


def loss(scale: Scale) -> Rows:
    rows = []
    for codec in BESIDE:
        config = {"codec": codec}
        with crew(
            VOLUNTEER,
            [{}] * PEERS,
            size=0,
            call_s=0.1,
            samples=8,
            target=256,
            steps=scale.loss_steps,
            config=config,
        ) as members:
            _train(members, scale.loss_steps)
            together = next(said for said in members[0].events if said["event"] == "done")["loss"]
            everybody = all(len(member.steps()) == scale.loss_steps for member in members)
            single = _single_process_loss(members, scale.loss_steps) if everybody else float("nan")
        name = f"held-out loss after {scale.loss_steps} steps in {codec}"
        ratio = together / single
        rows.append(json_row(name, together, LOSS_TARGET, beside=single, ratio=ratio, at_most=True))
    return rows


def _single_process_loss(members: list[Member], steps: int) -> float:
    """Of a model that one process trains on the batches that the members had in each step."""
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    done = {member.number: 0 for member in members}
    by_id = {member.joined()["peer_id"]: member for member in members}
    for step in range(1, steps + 1):
        said = {peer_id: member.steps()[step] for peer_id, member in by_id.items()}
        present = next(iter(said.values()))["members"]
        calls = sum(said[peer_id]["calls"] for peer_id in present)
        optimizer.zero_grad()
        for peer_id in by_id:
            number = by_id[peer_id].number
            indices = range(done[number], done[number] + said[peer_id]["calls"])
            done[number] = indices.stop
            for call in indices if peer_id in present else ():
                (model.loss(batch(BATCHES * number + call)) / calls).backward()
        optimizer.step()
    return held_out_loss(model)


PARTS: dict[str, Callable[[Scale], Rows]] = {
    "averaging": averaging,
    "groups": groups,
    "speeds": speeds,
    "loss": loss,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant of averaging")
    parser.add_argument("--steps", type=int, default=50, help="global steps of groups and of loss")
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1, help="of the failures")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "failures"], metavar="PART")
    parser.add_argument("--quick", action="store_true", help="a little of everything, 2 M parameters")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scale = Scale(arguments.rounds, 10_000_000, 5, arguments.steps, 6, 10.0, arguments.steps, arguments.failures)
    if arguments.quick:
        scale = QUICK
    parts = {**PARTS, "failures": lambda scale: failures(scale.failures, arguments.seed)}
    rows = [row for name, part in parts.items() if not arguments.only or name in arguments.only for row in part(scale)]
    Console().print(table_of(rows))
    if arguments.json:
        write_json(arguments.json, vars(arguments), rows=rows)


if __name__ == "__main__":
    main()
