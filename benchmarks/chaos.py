"""Generations while servers are killed, stopped, cut off or told to leave: do they go on, with which tokens, how soon?

    python benchmarks/chaos.py                      # everything; about half an hour
    python benchmarks/chaos.py kills --kills 20
    python benchmarks/chaos.py --quick --json chaos.json

Every span of blocks is held by two servers, and each server that ends is followed by another. The servers keep no
prefixes: whatever is replayed is computed. Ends with exit code 1 if a generation did not finish, or with other tokens
than an undisturbed one on the same servers.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import QUANT_NAMES, json_row, write_json
from fault_rates import measure_rates
from faults import (
    NUM_SPANS,
    Generation,
    PrefillTimes,
    Replicas,
    Tally,
    console,
    generation,
    model_path,
    random_prompts,
    results_table,
    spread,
    undisturbed,
    wait_until,
)
from hangs import measure_hangs
from make_model import DEFAULT_OUTPUT
from transformers import PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.core.events import Move, Recovery
from swarm_client.sessions.session import RemoteSession
from swarm_models.checkpoints.default_model import DEFAULT_MODEL

PROMPT_LENGTHS = (70, 100, 130, 160, 190)  # two chunks or more: their prefill can be cut in two
NEW_TOKENS = 32
LEAVE_TOKENS = 96
MOMENTS = ("prefill", "between", "mid-step")
COPIES_TIMEOUT_S, LEAVE_TIMEOUT_S = 20.0, 25.0
_POLL_S = 0.002


class Fault:
    """Something done to a hop of a session at some moment of a generation."""

    def __init__(self, hop: int, moment: str, at_token: int, delay_s: float, act: Callable[[str], None]) -> None:
        """``act`` is given the peer id of the server; ``delay_s`` is from the beginning of the prefill or step."""
        self._hop, self._moment, self._at_token, self._delay_s, self._act = hop, moment, at_token, delay_s, act
        self._thread: threading.Thread | None = None
        self.before: Callable[[RemoteSession], None] = lambda session: None  # called just before, between two steps

    def __call__(self, session: RemoteSession, num_tokens: int) -> None:
        if num_tokens != (0 if self._moment == "prefill" else self._at_token):
            return
        self.before(session)
        if self._moment == "between":
            self._now(session)
        else:
            self._thread = threading.Thread(target=self._later, args=(session,))
            self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _later(self, session: RemoteSession) -> None:
        while not session.hops:
            time.sleep(_POLL_S)
        time.sleep(self._delay_s)
        self._now(session)

    def _now(self, session: RemoteSession) -> None:
        self._act(session.hops[self._hop].server.peer_id)


@dataclass(frozen=True)
class Kill:
    """One server was killed. Seconds; ``prefill_s``: of the spans that moved, for what was computed again."""

    quant: str
    hop: int
    moment: str
    stall_s: float
    prefill_s: float
    hiccup_s: float | None
    replayed_tokens: int
    from_copy: bool
    num_recoveries: int

    @property
    def beyond_s(self) -> float:
        return self.stall_s - self.prefill_s


# ------------------------------------------------------------ kills, standby


def kill_servers(
    args: argparse.Namespace, cluster: LocalCluster, quant: str, num_kills: int, standby: bool
) -> tuple[list[Kill], Tally]:
    chance = random.Random(f"{args.seed} {quant} {standby}")
    moments = MOMENTS[1:] if standby else MOMENTS  # there is no copy before the first step has ended
    path = model_path(args.model, args.models)
    prompts = random_prompts(path, PROMPT_LENGTHS, args.seed)
    kills, tally = [], Tally()
    with Replicas(cluster, path, quant, *args.server_options.split()) as replicas:
        with replicas.client() as model:
            prefill = PrefillTimes(model, replicas.spans)
            right = [undisturbed(model, prompt, NEW_TOKENS) for prompt in prompts]
            with generation(model, prompts[0], NEW_TOKENS) as result:
                step_s = statistics.median(result.gaps_s)
        with replicas.client(standby=standby) as model:
            for number in range(num_kills):
                hop, moment = number % NUM_SPANS, moments[number // NUM_SPANS % len(moments)]
                which = chance.randrange(len(prompts))
                length = prompts[which].shape[1]
                whole_s = sum(prefill.seconds(span, length) for span in replicas.spans)
                delay_s = chance.uniform(0, 0.7 * whole_s) if moment == "prefill" else chance.uniform(0, step_s)
                victims: list[LocalServer] = []

                def kill(peer_id: str, victims: list[LocalServer] = victims) -> None:
                    victims.append(replicas.find(peer_id))
                    victims[-1].kill()
                    victims[-1].wait_gone()

                fault = Fault(hop, moment, chance.randint(1, NEW_TOKENS - 2), delay_s, kill)
                if standby:
                    fault.before = wait_for_copies
                with generation(model, prompts[which], NEW_TOKENS, fault) as result:
                    fault.wait()
                tally.add(model, quant, prompts[which], result, right[which])
                kills += killed(result, quant, hop, moment, length, prefill)
                for victim in victims:
                    replicas.replace(victim)
                replicas.wait_ready()
    return kills, tally


def killed(result: Generation, quant: str, hop: int, moment: str, length: int, prefill: PrefillTimes) -> Iterator[Kill]:
    recoveries = [event for event in result.events if isinstance(event, Recovery)]
    if not recoveries or result.error:
        return
    computed = length if moment == "prefill" else 0  # the prompt is no replay to those who had not finished it
    yield Kill(
        quant,
        hop,
        moment,
        stall_s=sum(event.stall_s for event in recoveries),
        prefill_s=sum(prefill.seconds(event.span, max(event.replayed_tokens, computed)) for event in recoveries),
        hiccup_s=None if moment == "prefill" else result.hiccup_s,
        replayed_tokens=sum(event.replayed_tokens for event in recoveries),
        from_copy=all(event.from_copy for event in recoveries),
        num_recoveries=len(recoveries),
    )


def wait_for_copies(session: RemoteSession) -> None:
    """Of all hops; bounded."""
    chain = session._lanes[0].chain
    wait_until(lambda: all(map(chain._standby.of, chain.hops)), COPIES_TIMEOUT_S)


def show_kills(kills: Sequence[Kill], standby: bool) -> None:
    table = results_table(f"Killed{' with copies standing by' if standby else ''}, seconds", "", "kills", "stall")
    if standby:
        table.add_column("from a copy", justify="right")
    else:
        for heading in ("prefill", "beyond it"):
            table.add_column(heading, justify="right")
    table.add_column("gap", justify="right")
    groups = [(quant, moment) for quant in QUANT_NAMES for moment in (None, *MOMENTS)]
    for quant, moment in groups:
        some = [kill for kill in kills if kill.quant == quant and moment in (None, kill.moment)]
        if not some:
            continue
        if standby:
            more = [str(sum(kill.from_copy for kill in some))]
        else:
            prefill = statistics.median(kill.prefill_s for kill in some)
            more = [f"{prefill:.2f}", spread([kill.beyond_s for kill in some])]
        hiccups = spread([kill.hiccup_s for kill in some if kill.hiccup_s is not None])
        stalls = spread([kill.stall_s for kill in some])
        table.add_row(f"{QUANT_NAMES[quant]} {moment or 'all'}", str(len(some)), stalls, *more, hiccups)
    console.print(table)
    console.print("targets: " + ("stall p50 ≤ 0.3" if standby else "stall − prefill p50 ≤ 0.5, p99 ≤ 2"))


def run_kills(args: argparse.Namespace, cluster: LocalCluster, standby: bool = False) -> tuple[Any, Tally]:
    all_kills, all_tally = [], Tally()
    for quant in args.quant:
        kills, tally = kill_servers(args, cluster, quant, args.standby_kills if standby else args.kills, standby)
        console.print(f"{QUANT_NAMES[quant]}{' with copies' if standby else ''}: {tally}")
        all_kills += kills
        all_tally += tally
    show_kills(all_kills, standby)
    return [asdict(kill) | {"beyond_s": kill.beyond_s} for kill in all_kills], all_tally


def run_standby(args: argparse.Namespace, cluster: LocalCluster) -> tuple[Any, Tally]:
    return run_kills(args, cluster, standby=True)


# ------------------------------------------------------------ leave


def run_leave(args: argparse.Namespace, cluster: LocalCluster) -> tuple[Any, Tally]:
    path = model_path(args.model, args.models)
    (prompt,) = random_prompts(path, PROMPT_LENGTHS[-1:], args.seed)
    rows, tally = [], Tally()
    for quant in args.quant:
        with Replicas(cluster, path, quant, *args.server_options.split()) as replicas, replicas.client() as model:
            right = undisturbed(model, prompt, LEAVE_TOKENS)
            for number in range(args.leaves):
                rows.append({"quant": quant, **leave(model, replicas, prompt, right, number % NUM_SPANS, tally)})
    headings = ("moved", "replayed", "copied", "move", "gap", "ended")
    table = results_table("Told to leave, seconds", "", *headings)
    for quant in args.quant:
        some = [row for row in rows if row["quant"] == quant]
        table.add_row(
            QUANT_NAMES[quant],
            f"{sum(row['moves'] == 1 for row in some)} of {len(some)}",
            str(sum(row["replayed_tokens"] for row in some)),
            f"{statistics.median(row['copied_tokens'] for row in some):g}",
            *(spread([row[name] for row in some]) for name in ("move_s", "hiccup_s", "ended_s")),
        )
    console.print(table)
    tally.errors += [f"a server left badly: {row}" for row in rows if row["replayed_tokens"] or not row["ended_s"]]
    console.print(f"target: nothing is computed again, and the server ends by itself\n{tally}")
    return rows, tally


def leave(
    model: PreTrainedModel, replicas: Replicas, prompt: torch.Tensor, right: list[int], hop: int, tally: Tally
) -> dict[str, Any]:
    draining: list[tuple[LocalServer, float]] = []

    def on_token(session: RemoteSession, num_tokens: int) -> None:
        if num_tokens == LEAVE_TOKENS // 4:
            server = replicas.find(session.hops[hop].server.peer_id)
            server.signal(signal.SIGTERM)
            draining.append((server, time.monotonic()))

    with generation(model, prompt, LEAVE_TOKENS, on_token) as result:
        server, signalled_s = draining[0]
        gone = server.wait_gone(LEAVE_TIMEOUT_S)  # while the session is still open
        ended_s = time.monotonic() - signalled_s if gone else None
    tally.add(model, replicas.quant, prompt, result, right)
    replicas.replace(server)
    replicas.wait_ready()
    moves = [event for event in result.events if isinstance(event, Move)]
    return {
        "hop": hop,
        "moves": len(moves),
        "replayed_tokens": result.stats.replayed_tokens,
        "recoveries": result.stats.recoveries,
        "copied_tokens": sum(move.copied_tokens for move in moves),
        "move_s": sum(move.seconds for move in moves),
        "hiccup_s": result.hiccup_s,
        "ended_s": ended_s,
    }


# ------------------------------------------------------------ command line

SECTIONS: dict[str, Callable[[argparse.Namespace, LocalCluster], tuple[Any, Tally]]] = {
    "kills": run_kills,
    "standby": run_standby,
    "hangs": measure_hangs,
    "rates": measure_rates,
    "leave": run_leave,
}


def json_rows(results: dict[str, Any], tally: Tally) -> list[dict[str, Any]]:
    """What is judged: all generations, and how long they stood still."""
    rows = [json_row("generations finished with the right tokens", tally.num_finished, tally.num_runs)]
    for section, target_s in (("kills", 0.5), ("standby", 0.3)):
        if some := results.get(section):
            seconds = statistics.median(kill["stall_s" if section == "standby" else "beyond_s"] for kill in some)
            rows.append(json_row(f"{section}: seconds of a stall, p50", seconds, target_s, at_most=True))
    if hangs := results.get("hangs"):
        noticed = [row["noticed_s"] for row in hangs if row.get("noticed_s") is not None]
        if noticed:
            rows.append(json_row("hangs: seconds until noticed, at most", max(noticed), 5.0, at_most=True))
    if leaving := results.get("leave"):
        replayed = sum(row["replayed_tokens"] for row in leaving)
        rows.append(json_row("leave: tokens computed again", replayed, 0.0, at_most=True))
    return rows


QUICK = {"kills": 9, "standby_kills": 3, "hangs": 1, "leaves": 1, "tokens": 64, "rates": [0.0, 1e-2], "quant": ["int8"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)}; by default all")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name of make_model.py, or any model's name or path")
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of make_model.py's checkpoints")
    parser.add_argument("--quant", nargs="+", default=list(QUANT_NAMES), choices=QUANT_NAMES)
    parser.add_argument("--kills", type=int, default=100, help="for each quantisation")
    parser.add_argument("--standby-kills", type=int, default=50, help="for each quantisation")
    parser.add_argument("--hangs", type=int, default=6)
    parser.add_argument("--silences", type=int, default=3)
    parser.add_argument("--leaves", type=int, default=6, help="for each quantisation")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 1e-4, 1e-3, 1e-2], metavar="P")
    parser.add_argument("--tokens", type=int, default=1024, help="of each generation of `rates`")
    parser.add_argument("--cap", type=float, default=120.0, help="seconds for a client that starts again and again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-options", default="--prefix-cache none", help="in one string")
    parser.add_argument("--quick", action="store_true", help="a little of everything, in int8, in one to three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections {', '.join(unknown)}: expected some of {', '.join(SECTIONS)}")
    if args.quick:
        vars(args).update(QUICK)
    torch.set_num_threads(1)
    logging.getLogger("swarm_client.core.events").setLevel(logging.ERROR)  # counted, and shown in the tables
    results, tally = {}, Tally()
    with LocalCluster() as cluster:
        for name in args.sections or SECTIONS:
            console.print(f"\n[bold]{name}[/]")
            results[name], outcome = SECTIONS[name](args, cluster)
            tally += outcome
            if args.json:
                write_json(args.json, vars(args), rows=json_rows(results, tally), **results, tally=asdict(tally))
    console.print(f"\n[bold]in all[/]: {tally}")
    sys.exit(not tally.good)


if __name__ == "__main__":
    main()
