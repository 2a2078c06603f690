"""Training together over home lines: the share of time that peers compute, and the loss after equal samples and time.

    python benchmarks/home_lines.py [--minutes 7] [--only NAME …] [--quick] [--json FILE]

4 peers, each a process in a network namespace with a line of its own of 10 or 100 Mbit/s, train a model of 20 M
parameters on a Markov chain of the second order. Three ways: an average of `int8` gradients at every step of 64 rows;
`2bit` averages after local steps of 8 rows, 15 of each peer; the same while peers go on with the next local steps. A
call of 4 rows takes two seconds, or longer if the machine is busy, which the share shows as computing. Each way trains
for the same time. Beside it: one process that has trained on as many rows, 64 a step, with nobody to wait for. Needs
root, iproute2, /dev/net/tun and a C compiler.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import has_lab, json_row, table_of, write_json
from compression import LanguageModel, batch
from home_lines_peer import BATCHES, held_out_loss
from network_lab import Link, NetworkLab, half
from rich.console import Console
from training_crew import Member

PEERS, CALL_ROWS, STEP_ROWS, LOCAL_ROWS, ROUND_CALLS = 4, 4, 64, 8, 30
DELAY_MS = 40  # there and back
LEAST_SHARE, MOST_LOSS = 0.7, 1.0
LONGEST_AVERAGE_S = 400.0
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """How much is measured. ``call_s``: what a call of a peer takes at least."""

    hidden: int
    layers: int
    for_s: float
    call_s: float
    lr: float


FULL_HIDDEN, FULL_LAYERS, FULL_LR = 640, 4, 5e-4
QUICK = Scale(192, 2, 40.0, 0.1, 1e-3)


@dataclass(frozen=True)
class Way:
    """One way to exchange over lines of so many Mbit/s."""

    mbit: int
    is_local: bool
    is_delayed: bool = False

    @property
    def task(self) -> dict[str, Any]:
        if self.is_local:
            target = PEERS * ROUND_CALLS * CALL_ROWS
            return {"target": target, "inner_rows": LOCAL_ROWS, "config": {"codec": "2bit", "delay": self.is_delayed}}
        return {"target": STEP_ROWS, "config": {"codec": "int8"}}


WAYS = {
    f"{name}, {mbit} Mbit/s": Way(mbit, name != "every step", name == "delayed local steps")
    for mbit in (10, 100)
    for name in ("every step", "local steps", "delayed local steps")
}


@dataclass(frozen=True)
class Trained:
    """What a way has come to: the share of time computing, the rows of all peers, averages, and the held-out loss."""

    share: float
    rows: int
    averages: int
    loss: float


def train(way: Way, scale: Scale) -> Trained:
    """Raises Silent if a peer fails."""
    hosts = [f"peer{number}" for number in range(PEERS)]
    link = half(Link(delay_ms=DELAY_MS / 2, queue_ms=1000))
    common = {"rows": CALL_ROWS, "hidden": scale.hidden, "layers": scale.layers, "call_s": scale.call_s}
    common |= {"for_s": scale.for_s, "lr": scale.lr, **way.task}
    with ExitStack() as stack:
        lab = stack.enter_context(NetworkLab(dict.fromkeys(hosts, link)))
        members: list[Member] = []
        for number, host in enumerate(hosts):
            peers = members[0].joined()["peers"] if members else []
            member = Member(
                "home_lines_peer.py", lab.on(host), number=number, peers=peers, host=lab.addresses[host], **common
            )
            stack.callback(member.kill)
            members.append(member)
        for member in members:
            member.joined()
        for host in hosts:  # only now, since joiners load the whole state
            lab.set_link(host, replace(link, mbit=way.mbit))
        for member in members:
            member.order("go")
        done = [member.next("done", scale.for_s + LONGEST_AVERAGE_S) for member in members]
    share = statistics.mean(each["share"] for each in done)
    most = max(done, key=lambda each: each["rows"])  # who has missed the last average has not counted it
    return Trained(share, most["rows"], most["averages"], most["loss"])


def single_process_losses(rows: set[int], scale: Scale) -> dict[int, float]:
    """Return the held-out losses of one process after so many rows, to the next step of STEP_ROWS."""
    torch.manual_seed(0)
    model = LanguageModel(scale.hidden, scale.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=scale.lr)
    losses, calls = {}, 0
    for wanted in sorted(rows):
        while calls * CALL_ROWS < wanted:
            optimizer.zero_grad()
            for _ in range(STEP_ROWS // CALL_ROWS):
                index = BATCHES * (calls % PEERS) + calls // PEERS
                (model.loss(batch(index, CALL_ROWS)) * CALL_ROWS / STEP_ROWS).backward()
                calls += 1
            optimizer.step()
        losses[wanted] = held_out_loss(model)
    return losses


def rows_of(trained: dict[str, Trained], scale: Scale) -> Rows:
    single = single_process_losses({each.rows for each in trained.values()}, scale)
    rows = []
    for name, each in trained.items():
        facts = {"rows": each.rows, "averages": each.averages}
        target = LEAST_SHARE if WAYS[name].is_local else None
        rows.append(json_row(f"{name}: share of time computing", each.share, target, **facts))
        beside, note = single[each.rows], f"{name}: held-out loss after {each.rows} rows (beside one process)"
        rows.append(json_row(note, each.loss, beside=beside, ratio=each.loss / beside, at_most=True, **facts))
    for name, local in trained.items():
        every = trained.get(f"every step, {WAYS[name].mbit} Mbit/s", local)
        if every is not local:
            note = f"{name}: held-out loss after equal time (beside every step)"
            rows.append(
                json_row(note, local.loss, MOST_LOSS, beside=every.loss, ratio=local.loss / every.loss, at_most=True)
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7, help="that each way trains")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a tiny model, less than a minute for each way")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    console = Console(width=150, highlight=False)
    if not has_lab(args.json, vars(args)):
        return 0
    scale = QUICK if args.quick else Scale(FULL_HIDDEN, FULL_LAYERS, 60 * args.minutes, 2.0, FULL_LR)
    trained = {}
    for name in args.only:
        trained[name] = train(WAYS[name], scale)
        console.print(f"{name}: {trained[name]}")
    torch.set_num_threads(os.cpu_count() or 1)
    rows = rows_of(trained, scale)
    console.print(table_of(rows))
    if args.json:
        write_json(args.json, vars(args), rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
