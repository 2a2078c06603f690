"""What placement is worth: swarms of 10 to 10 000 servers that come, go and vanish, in virtual time.

    python benchmarks/simulate_swarm.py [--training] [--quick] [--sizes 10 …] [--hours H] [--seed N] [--json FILE]
                                        [--plot FILE.png]

The same servers come and go (``churn.py``) under three policies (``policies.py``): our placement without moving later,
our placement, and the policy Petals documents, by our reading of its code. Placement and routing are the real code. A
server that moves takes its time: it says so, looks again after 2 s, drains for 1 to 10 s in which it counts as gone,
and loads for 2 s and 1 s per block; under Petals' policy it only loads. Others see of a server what it was 1 s before,
and one that crashed for 5 s more: failed contacts end a ghost, not the 120 s of its record. From 1000 servers on, those
who ask whether to move read a view up to 5 s older, so that all who read it share one plan.

Throughput is what the servers that are ONLINE carry if clients spread as well as possible (``capacity.py``), averaged
over the time with churn, in proportion to the optimum for the servers present: of 10, by exact search; of more, what no
assignment exceeds (``Coverage.upper_bound``). Linear programs confirm the throughput, exact searches show how tight
that bound is, and micro-batches on real routes show what of the throughput clients get.

``--training`` simulates peers that train in stages instead, see ``simulate_training.py``.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from churn import Scenario, first_spans, lives
from common import json_row, write_json
from metrics import Metrics
from optimum import exact_optimum, routed, throughput_by_linear_program
from policies import NoRebalancing, Petals, Swarm, shared_plans
from rich.console import Console
from rich.table import Table
from simulate_training import QUICK as QUICK_TRAINING
from simulate_training import SCENARIOS as TRAINING
from simulate_training import TARGET as TRAINING_TARGET
from simulate_training import simulate_training
from virtual_swarm import Policy, VirtualSwarm

from swarm_server.placement.capacity import Coverage

_FLEETS = Scenario(100, 80, 2, 6, hours=4, lifetime_h=2, preemptible=0.8, burst_every_h=0.5, back_after_s=(1200, 3600))
_LARGE = 1000  # from here on, views are shared for longer
SCENARIOS = {
    10: Scenario(10, 32, 5, 10, hours=24, lifetime_h=6, zones=2, burst_every_h=1.5, back_after_s=(600, 2400)),
    100: _FLEETS,
    1000: replace(_FLEETS, num_servers=1000, hours=1, burst_every_h=0.25),
    10_000: replace(_FLEETS, num_servers=10_000, hours=0.2, burst_every_h=0.1, back_after_s=(300, 600), rest_s=900),
}
QUICK = {10: 3.0, 100: 0.2}  # hours
# Servers: up to there the optimum is searched for, and under Petals' policy each imagines others' moves by itself.
EXACT_UP_TO = 10
OPTIMUM_TARGET, NO_REBALANCING, HEAL_TARGET_S = 0.97, 0.85, 60.0


@dataclass
class Checks:
    """What was looked at more closely at sampled instants, under our placement.

    Attributes:
        linear_programs: how many agreed with the throughput.
        bounds: ``Coverage.upper_bound`` / (what an exact search proved that nothing exceeds).
        streams, alone: (tokens per second of micro-batches on real routes, see ``Routed``) / (throughput).
    """

    linear_programs: int = 0
    bounds: list[float] = field(default_factory=list)
    streams: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    def look(self, swarm: VirtualSwarm) -> None:
        online, num_servers = swarm.online(), swarm.scenario.num_servers
        carried = online.balance().tokens_per_s
        if num_servers < _LARGE or not self.linear_programs:
            by_program = throughput_by_linear_program(online)
            assert math.isclose(carried, by_program, rel_tol=1e-5, abs_tol=1e-6), f"{carried} is not {by_program}"
            self.linear_programs += 1
        there = swarm.there()
        if num_servers <= EXACT_UP_TO and there.lengths.sum() >= there.num_blocks:
            self.bounds.append(there.upper_bound() / exact_optimum(there))
        if num_servers <= 100 and carried:
            on_routes = routed(swarm.online_view(), swarm.num_blocks)
            self.streams.append(on_routes.stream / carried)
            self.alone.append(on_routes.alone / carried)


def simulate(scenario: Scenario, seed: int, num_checks: int) -> tuple[dict[str, Metrics], Checks]:
    """The same events under each policy."""
    everybody, checks = lives(scenario, seed), Checks()
    large = scenario.num_servers >= _LARGE
    by_policy = {}
    policies: Sequence[Policy] = (NoRebalancing(), Swarm(), Petals(EXACT_UP_TO))
    for policy in policies:
        swarm = VirtualSwarm(
            scenario,
            everybody,
            first_spans(scenario, everybody),
            policy,
            seed,
            view_s=5.0 if large else 0.0,
            sample_s=5.0 if large else 2.0,
            optimum=exact_optimum if scenario.num_servers <= EXACT_UP_TO else Coverage.upper_bound,
        )
        if isinstance(policy, Swarm):
            for number in range(num_checks):
                swarm.at((number + 0.5) * scenario.churn_s / num_checks, lambda swarm=swarm: checks.look(swarm))
        with shared_plans():
            by_policy[policy.name] = swarm.run()
    return by_policy, checks


# ---------------------------------------------------------------- results


def print_results(
    console: Console, scenario: Scenario, by_policy: dict[str, Metrics], checks: Checks, wall_s: float
) -> None:
    table = Table(box=None, title=str(scenario), title_justify="left")
    for column in (
        *("", "of the optimum", "lowest block, of the mean", "gaps", "healed after, s", "opened by moves"),
        *("impossible to cover", "moves per server and hour", "at rest"),
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, metrics in by_policy.items():
        healed = metrics.heal_s()
        table.add_row(
            name,
            f"{metrics.of_optimum:.1%}",
            f"{metrics.of_mean_block:.1%}",
            str(len(healed)),
            f"{median(healed):.0f}, at most {max(healed):.0f}" if healed else "–",
            str(sum(gap.by_move for gap in metrics.gaps)),
            str(len(metrics.heal_s(coverable=False))),
            f"{metrics.moves_per_hour:.2f}",
            f"{metrics.moves_per_hour_at_rest:g}",
        )
    ours, without = by_policy[Swarm.name], by_policy[NoRebalancing.name]
    table.add_row(
        *("target", f"≥ {OPTIMUM_TARGET:.0%}", "", "", f"≤ {HEAL_TARGET_S:.0f}", "0", "", "", "0"), style="dim"
    )
    console.print(table)
    missed = [
        *([f"no rebalancing should give at most {NO_REBALANCING:.0%}"] if without.of_optimum > NO_REBALANCING else []),
        *(["throughput"] if ours.of_optimum < OPTIMUM_TARGET else []),
        *(["healing"] if max(ours.heal_s(), default=0.0) > HEAL_TARGET_S else []),
        *(["a move opened a gap"] if any(gap.by_move for gap in ours.gaps) else []),
        *(["rest"] if ours.moves_at_rest else []),
    ]
    console.print(f"missed: {', '.join(missed)}" if missed else "all targets reached")
    notes = [f"throughput confirmed by {checks.linear_programs} linear programs"]
    if checks.bounds:
        notes.append(
            f"at {len(checks.bounds)} instants the bound for more servers was {median(checks.bounds) - 1:.1%} above "
            f"the exact optimum in the median, {max(checks.bounds) - 1:.1%} at most"
        )
    if checks.streams:
        notes.append(
            f"micro-batches on real routes reach {median(checks.streams):.1%} of the throughput in the median, "
            f"{min(checks.streams):.1%} at least; 50 for each replica, with filling and emptying the chains, "
            f"{median(checks.alone):.1%}"
        )
    console.print(f"{'; '.join(notes)}; {wall_s:.0f} s\n")


def plot(file: Path, results: dict[int, dict[str, Metrics]], target: float, bin_s: float = 60.0) -> None:
    """Throughput relative to the optimum over time, in means of ``bin_s``: a panel per size, a line per policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(results), figsize=(10, 2.4 * len(results)), squeeze=False, layout="constrained")
    for panel, (size, by_policy) in zip(panels[:, 0], results.items(), strict=True):
        for name, metrics in by_policy.items():
            step = max(1, round(bin_s / (metrics.times[1] - metrics.times[0])))
            firsts = range(0, len(metrics.times) - step + 1, step)
            values = [
                sum(metrics.carried[first : first + step]) / max(1e-9, sum(metrics.optimum[first : first + step]))
                for first in firsts
            ]
            panel.plot([metrics.times[first] / 3600 for first in firsts], values, label=name, linewidth=0.9)
        panel.set(title=f"{size} servers", ylim=(0, 1.02), ylabel="of the optimum")
        panel.axhline(target, color="gray", linewidth=0.5, linestyle=":")
    panels[0, 0].legend(loc="lower left", fontsize="small")
    panels[-1, 0].set_xlabel("hours")
    figure.savefig(file, dpi=90)


def json_rows(size: int, by_policy: dict[str, Metrics]) -> list[dict[str, Any]]:
    """Throughput of each policy beside the optimum, and what else has a target."""
    ours = by_policy[Swarm.name]
    shares = [
        json_row(
            f"{size} servers, {name}: share of the optimum",
            metrics.of_optimum,
            OPTIMUM_TARGET if metrics is ours else None,
            beside=1.0,
        )
        for name, metrics in by_policy.items()
    ]
    bounds = {
        "seconds until a gap is healed, at most": (max(ours.heal_s(), default=0.0), HEAL_TARGET_S),
        "gaps opened by moves": (sum(gap.by_move for gap in ours.gaps), 0),
        "moves at rest": (ours.moves_at_rest, 0),
    }
    return shares + [
        json_row(f"{size} servers, {what}", float(value), float(target), at_most=True)
        for what, (value, target) in bounds.items()
    ]


def as_json(scenario: Scenario, by_policy: dict[str, Metrics], checks: Checks) -> dict[str, Any]:
    series = {
        name: {
            "times_s": metrics.times,
            "carried": [round(value, 3) for value in metrics.carried],
            "optimum": [round(value, 3) for value in metrics.optimum],
        }
        for name, metrics in by_policy.items()
    }
    return {
        "scenario": vars(scenario),
        "policies": {name: metrics.summary() for name, metrics in by_policy.items()},
        "checks": vars(checks),
        "series": series,
    }


# ---------------------------------------------------------------- command line


def main() -> None:
    args = parse()
    console = Console(highlight=False, width=None if Console().is_terminal else 150)
    if args.training:
        by_size, rows = simulate_training(console, args.sizes, args.hours, args.seed, args.quick)
        if args.plot:
            plot(args.plot, by_size, TRAINING_TARGET)
        if args.json:
            write_json(args.json, vars(args), rows=rows)
        return
    console.print(
        "Petals' policy is our reading of what Petals documents. The optimum for 10 servers is exact, else a bound.\n"
    )
    results, written = {}, {}
    for size in args.sizes:
        scenario = SCENARIOS[size]
        if hours := args.hours or (QUICK[size] if args.quick else None):
            scenario = replace(scenario, hours=hours)
        start = time.perf_counter()
        by_policy, checks = simulate(scenario, args.seed, num_checks=2 if args.quick else 24)
        print_results(console, scenario, by_policy, checks, time.perf_counter() - start)
        results[size], written[str(size)] = by_policy, as_json(scenario, by_policy, checks)
    if args.plot:
        plot(args.plot, results, OPTIMUM_TARGET)
    if args.json:
        rows = [row for size, by_policy in results.items() for row in json_rows(size, by_policy)]
        write_json(args.json, vars(args), rows=rows, sizes=written)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--training", action="store_true", help="100 and 1000 peers that train in stages")
    parser.add_argument("--quick", action="store_true", help="10 and 100 servers, or 100 peers, for a short time")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SCENARIOS, metavar="N", help="10, 100, 1000, 10000")
    parser.add_argument("--hours", type=_hours, metavar="H", help="of churn, of every size")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="throughput over time")
    args = parser.parse_args()
    scenarios, quick, who = (TRAINING, QUICK_TRAINING, "peers") if args.training else (SCENARIOS, QUICK, "servers")
    if args.training and not set(args.sizes or ()) <= TRAINING.keys():
        parser.error(f"--training simulates {' or '.join(map(str, TRAINING))} peers: leave out the other sizes")
    if args.quick and not set(args.sizes or ()) <= quick.keys():
        parser.error(f"--quick simulates {' and '.join(map(str, quick))} {who}: leave out --quick or the other sizes")
    args.sizes = args.sizes or list(quick if args.quick else scenarios)
    for file in (args.json, args.plot):
        if file and not file.parent.is_dir():
            parser.error(f"{file.parent} is no directory: {file.name} cannot be written there")
    if args.plot and args.plot.suffix != ".png":
        parser.error(f"--plot {args.plot}: expected a file name that ends in .png")
    if args.plot and find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "swarm-lm[bench]"')
    return args


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hours: expected more than 0, at most 1000")
    return hours


if __name__ == "__main__":
    main()
