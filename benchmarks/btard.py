"""BTARD: how soon are attackers removed, and is an honest peer ever?

    python benchmarks/btard.py [--seeds 10] [--clean-steps 500] [--audit-share 0.2] [--only KIND …] [--quick]
                               [--json FILE]

10 peers in one process, 3 of them attackers of one kind, until all of those are out, or for 60 steps. "Banned" are
those who were proven to lie, "silent" those who may come back as newcomers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from btard_swarm import DIMENSIONS, KINDS, Peer, Removed, Swarm, noisy_gradients
from common import json_row, write_json
from rich.console import Console
from rich.table import Table

from swarm_training.robust.roster import Rules

PEERS = [f"peer{number}" for number in range(10)]
ATTACKERS = PEERS[1], PEERS[4], PEERS[7]
MOST_STEPS, TARGET_STEPS = 60, 30
QUICK_SEEDS, QUICK_CLEAN_STEPS = 2, 30


def attacked(kind: str, seed: int, rules: Rules) -> dict[str, Removed]:
    """Who was removed, until all attackers are."""
    kinds = {name: KINDS[kind] if name in ATTACKERS else Peer for name in PEERS}
    swarm = Swarm(kinds, noisy_gradients(seed=seed), DIMENSIONS, seed, rules)
    while swarm.step_number < MOST_STEPS and not set(ATTACKERS) <= swarm.removed.keys():
        swarm.step()
    return swarm.removed


def clean(steps: int, seed: int, rules: Rules) -> tuple[int, float]:
    """How many honest peers were removed, and seconds per step of all peers together."""
    swarm = Swarm(dict.fromkeys(PEERS, Peer), noisy_gradients(seed=seed), DIMENSIONS, seed, rules)
    start = time.perf_counter()
    for _ in range(steps):
        swarm.step()
    return len(swarm.removed), (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--clean-steps", type=int, default=500)
    parser.add_argument("--audit-share", type=float, default=Rules().audit_share)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), metavar="KIND", default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="two seeds, 30 clean steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.clean_steps = QUICK_SEEDS, QUICK_CLEAN_STEPS
    torch.set_num_threads(1)
    rules = Rules(audit_share=arguments.audit_share)
    console, rows = Console(), list[dict[str, Any]]()
    table = Table("attackers, 3 of 10", "all out after steps: median", "most", "banned", "silent", "honest removed")
    for kind in arguments.only:
        runs = [attacked(kind, seed, rules) for seed in range(arguments.seeds)]
        steps = [max(run[name].step + 1 if name in run else MOST_STEPS for name in ATTACKERS) for run in runs]
        banned = sum(run[name].is_banned for run in runs for name in ATTACKERS if name in run)
        silent = sum(not run[name].is_banned for run in runs for name in ATTACKERS if name in run)
        honest = sum(len(run.keys() - set(ATTACKERS)) for run in runs)
        table.add_row(kind, f"{statistics.median(steps):g}", f"{max(steps)}", f"{banned}", f"{silent}", f"{honest}")
        rows.append(json_row(kind, max(steps), TARGET_STEPS, at_most=True, steps=steps, banned=banned, silent=silent))
        rows.append(json_row(f"{kind}: honest peers removed", honest, 0, at_most=True))
    removed, step_s = clean(arguments.clean_steps, 0, rules)
    console.print(table)
    console.print(f"{arguments.clean_steps} steps without attackers: {removed} of 10 removed; {step_s:.3f} s a step")
    rows.append(
        json_row("honest peers removed without attackers", removed, 0, at_most=True, steps=arguments.clean_steps)
    )
    if arguments.json:
        write_json(arguments.json, vars(arguments), rows=rows)


if __name__ == "__main__":
    main()
