"""A week of training together, in virtual time: home lines, nights off, two whole stops, one bad batch.

    python benchmarks/training_week.py [--json FILE]      # 20 volunteers for seven days
    python benchmarks/training_week.py --quick            # 5 volunteers for one day

The peers are the real ones of a run with local steps and 2-bit codes; only clock, network and DHT are simulated. They
train a small model whose best loss is known exactly. Its messages take as long on each line as those of a model of 20
million parameters would. Beside them one process trains on the same batches, in the order of the steps that counted.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import json_row, write_json
from repository import ROOT
from rich.console import Console
from rich.table import Table
from simulated_week import DAY_S, HOUR_S, Week, WeekPlan, WeekResult

from tests.worlds.runs import simulate

assert ROOT.is_dir()
QUICK = WeekPlan(volunteers=5, days=1.0, round_h=1.0, stops_h=(7.0, 18.0), bad_batch_h=14.0)
COMPUTING = 0.7  # the least share of the time
LOSS = 1.05  # the most, beside one process after the same samples


def rows_of(plan: WeekPlan, result: WeekResult) -> list[dict[str, Any]]:
    rollbacks = len(plan.stops_h) + 1
    return [
        json_row("different states at the end", result.final_states, 1, at_most=True),
        json_row("moments at which peers differed", len(result.differing), 0, at_most=True),
        json_row("rollbacks: the stops and the bad batch", result.rollbacks, rollbacks, at_most=True),
        json_row("most steps that one of these undid", max(result.undone_steps, default=0)),
        json_row("steps at the end", result.steps),
        json_row("samples in averages that lasted", result.samples),
        json_row("share of samples that no average has", result.lost_samples),
        json_row("share of time computing", result.computing, COMPUTING),
        json_row(
            "loss, beside one process after the same samples",
            result.loss,
            LOSS,
            beside=result.single_loss,
            ratio=result.loss / result.single_loss,
            at_most=True,
            lowest=result.lowest_loss,
        ),
        json_row(
            "loss, beside one process after the same time",
            result.loss,
            1.0,
            beside=result.loss_at_equal_time,
            ratio=result.loss / result.loss_at_equal_time,
            at_most=True,
        ),
        json_row(
            "hours, beside one process for the same samples",
            result.seconds / HOUR_S,
            1.0,
            beside=result.single_s / HOUR_S,
            ratio=result.seconds / result.single_s,
            at_most=True,
        ),
    ]


def table_of(plan: WeekPlan, rows: list[dict[str, Any]]) -> Table:
    title = (
        f"{plan.volunteers} volunteers, {plan.days:g} days, {plan.parameters / 1e6:g} M parameters, rounds of "
        f"{plan.round_h:g} h; whole stops after {', '.join(f'{each:g}' for each in plan.stops_h)} h, "
        f"a bad batch after {plan.bad_batch_h:g} h"
    )
    table = Table(box=None, title=title, title_justify="left")
    for column in ("", "measured", "beside", "ratio", "target", "met"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        numbers = ("" if row[key] is None else f"{row[key]:.4g}" for key in ("measured", "beside", "ratio", "target"))
        table.add_row(row["name"], *numbers, row["met"] or "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5 volunteers for one day")
    parser.add_argument("--seed", type=int, default=0, help="of the volunteers' machines, lines and nights")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("swarm_training").setLevel(logging.ERROR)
    plan = WeekPlan(**{**vars(QUICK if args.quick else WeekPlan()), "seed": args.seed})
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as disks:
        week = Week(plan, Path(disks))
        result = simulate(week.live, (plan.days + 2) * DAY_S)
    rows = rows_of(plan, result)
    console = Console(width=120, soft_wrap=True)
    console.print(table_of(plan, rows))
    console.print(f"{plan.days:g} days in {time.perf_counter() - start_s:.0f} s", style="dim")
    if args.json:
        write_json(args.json, vars(args), rows=rows)
    sys.exit(any(row["met"] == "no" for row in rows))


if __name__ == "__main__":
    main()
