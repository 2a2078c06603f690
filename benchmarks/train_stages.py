"""Training in stages: its throughput beside one process on as many cores, and while peers are killed.

    python benchmarks/train_stages.py [--rounds 3] [--kills 8] [--only PART …] [--quick] [--json FILE]

`throughput`: two stages of one peer and one thread each, and a trainer, beside two processes of one thread that each
train the same model by themselves on the same micro-batches, both together; tokens/s. One process with two threads
would be slower than those: it also waits for its slower thread. `kills`: two stages of four peers whose computing takes
a given time, so that they do not need cores of their own; one is killed every so often, and replaced by a new one,
which takes the stage that limits the run (with rebalancing), or any. The throughput is compared with that of the peers
that lived: of all eight, seven eighths while one was missing. From it follows what a kill costs, and from that the
shares at 1, 5 and 10 % of the peers per minute.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import json_row, median_ratio, table_of, take_turns, write_json
from rich.console import Console
from stages_run import SCRIPT, WAIT_S, Process, Scale, all_ended, write_run

LOCAL_TARGET, KILLS_TARGET = 0.75, 0.85
MATES, CALL_S = 4, 0.05
RATES = 0.01, 0.05, 0.1  # of the peers, per minute
Rows = list[dict[str, Any]]
FULL = Scale(512, 4, 128, 4, 32, 2, 3, 8)
QUICK = Scale(128, 4, 64, 2, 8, 2, 1, 1, 10.0)


def _rate(process: Process, steps: int, tokens: int) -> float:
    """Tokens/s between the first step's end and the last's."""
    process.wait_for(lambda: len(process.steps) > steps, WAIT_S * (steps + 1))
    times = process.steps
    return steps * tokens / (times[steps] - times[0])


def _both_rates(processes: list[Process], steps: int, tokens: int) -> float:
    """The sum of what they do while both are there."""
    for process in processes:
        process.wait_for(lambda process=process: len(process.steps) > steps, WAIT_S * (steps + 1))
    return sum(_rate(process, steps, tokens) for process in processes)


def throughput(scale: Scale) -> Rows:
    tokens = scale.micro_batches * scale.rows * scale.length
    with tempfile.TemporaryDirectory() as directory:
        run_file = write_run(scale, Path(directory), scale.micro_batches)

        def local() -> float:
            command = [SCRIPT, "local", str(run_file), "1000"]
            with all_ended([Process.start(*command) for _ in range(2)]) as processes:
                return _both_rates(processes, scale.steps, tokens)

        def in_stages() -> float:
            with all_ended([]) as processes:
                for stage in range(2):
                    joining = ["--initial-peers", processes[0].address or ""] if processes else []
                    serve = ["-m", "swarm_training.stages", "serve", str(run_file), "--stage", str(stage)]
                    processes.append(Process.start(*serve, "--host", "127.0.0.1", *joining))
                    processes[-1].wait_for(lambda: processes[-1].address)
                return _rate(_trainer(run_file, processes), scale.steps, tokens)

        measured = take_turns(scale.rounds, {"local": local, "in stages": in_stages})
    seconds, beside = measured["in stages"], measured["local"]
    return [
        json_row(
            f"two stages of one thread beside two local processes, tokens/s, steps of {tokens} tokens",
            statistics.median(seconds),
            LOCAL_TARGET,
            beside=statistics.median(beside),
            ratio=median_ratio(seconds, beside),
            turns=seconds,
            turns_beside=beside,
        )
    ]


def _trainer(run_file: Path, processes: list[Process]) -> Process:
    """Beside the peers, which come first."""
    address = processes[0].address or ""
    processes.append(Process.start("-m", "swarm_training.stages", "trainer", str(run_file), "--initial-peers", address))
    return processes[-1]


def kills(scale: Scale) -> Rows:
    """The model is a small one: its computing takes as long as it is told."""
    small = Scale(64, 2, 16, 1, 64, 0, 0, scale.kills, scale.kill_s)
    shares: dict[str, float] = {}
    rows: Rows = []
    for way in ("with rebalancing", "without"):
        found = _churned(small, rebalances=way == "with rebalancing")
        shares[way] = found.share
        killed = f"{60 / scale.kill_s:.1f} of {2 * MATES} peers killed and replaced per minute, {way}"
        rows.append(
            json_row(
                f"{killed}: steps/s beside those that live",
                found.disturbed,
                KILLS_TARGET if way == "with rebalancing" else None,
                beside=found.undisturbed * found.living,
                ratio=found.share,
                undisturbed=found.undisturbed,
                living=found.living,
            )
        )
    cost_s = max(0.0, 1 - shares["with rebalancing"]) * scale.kill_s
    rows.append(json_row("cost of a kill with rebalancing, s of the whole run", cost_s))
    for rate in RATES:
        share = 1 - cost_s * rate * 2 * MATES / 60
        rows.append(
            json_row(f"{rate:.0%} of {2 * MATES} peers killed per minute, share (computed)", share, KILLS_TARGET)
        )
    return rows


@dataclass(frozen=True)
class Churned:
    """Attributes:
    undisturbed, disturbed: steps/s of all peers, and while some are killed.
    living: the share of peers that had joined, on average of that time.
    """

    undisturbed: float
    disturbed: float
    living: float

    @property
    def share(self) -> float:
        return self.disturbed / (self.undisturbed * self.living)


def _churned(scale: Scale, *, rebalances: bool) -> Churned:
    """Kills somebody every so often, never the last one of a stage; a new one comes: to the stage that limits the run,
    or to any, and then all stay where they are."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as directory, all_ended([]) as processes:
        run_file = write_run(scale, Path(directory), scale.micro_batches, checkpoint_every=4)
        peers: list[Process] = []

        def join(stage: int | None) -> Process:
            known = [each.address for each in peers if each.address][:2]
            where = "any" if stage is None else str(stage)
            peer = Process.start(SCRIPT, "peer", str(run_file), where, str(CALL_S), *filter(None, known))
            processes.insert(0, peer)
            peers.append(peer)
            return peer

        first = join(0)
        first.wait_for(lambda: first.address)
        for peer in [join(stage) for stage in (0, 1) for _ in range(MATES - (1 - stage))]:
            peer.wait_for(lambda peer=peer: peer.address)
        trainer = Process.start(
            "-m", "swarm_training.stages", "trainer", str(run_file), "--initial-peers", first.address or ""
        )
        processes.append(trainer)
        trainer.wait_for(lambda: trainer.steps)
        undisturbed = _steps_per_s(trainer, scale.kill_s * scale.kills / 2, lambda: None)
        living: list[float] = []

        def churn() -> None:
            for _ in range(scale.kills):
                at_stage = [sum(peer.stage == stage for peer in peers) for stage in (0, 1)]
                victim = rng.choice([peer for peer in peers if peer.stage is not None and at_stage[peer.stage] > 1])
                peers.remove(victim)
                victim.kill()
                join(None if rebalances else rng.randrange(2))
                until_s = time.monotonic() + scale.kill_s
                while time.monotonic() < until_s:
                    living.append(sum(peer.address is not None for peer in peers) / (2 * MATES))
                    time.sleep(0.1)

        disturbed = _steps_per_s(trainer, scale.kill_s * scale.kills, churn)
    return Churned(undisturbed, disturbed, statistics.mean(living))


def _steps_per_s(trainer: Process, seconds: float, during: Callable[[], object]) -> float:
    """From one step's end to another's; a step counts once, though the run may go back."""
    trainer_steps = lambda: {line.split(":")[0] for _, line in trainer.lines if line.startswith("step ")}  # noqa: E731
    before, start_s = len(trainer_steps()), trainer.steps[-1]
    during()
    trainer.wait_for(lambda: trainer.steps[-1] - start_s >= seconds)
    return (len(trainer_steps()) - before) / (trainer.steps[-1] - start_s)


PARTS: dict[str, Callable[[Scale], Rows]] = {"throughput": throughput, "kills": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=FULL.rounds, help="turns of each contestant")
    parser.add_argument("--kills", type=int, default=FULL.kills)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    scale = Scale(
        FULL.hidden,
        FULL.layers,
        FULL.length,
        FULL.rows,
        FULL.micro_batches,
        FULL.steps,
        arguments.rounds,
        arguments.kills,
    )
    scale = QUICK if arguments.quick else scale
    rows = [row for name, part in PARTS.items() if not arguments.only or name in arguments.only for row in part(scale)]
    Console().print(table_of(rows))
    if arguments.json:
        write_json(arguments.json, vars(arguments), rows=rows)


if __name__ == "__main__":
    main()
