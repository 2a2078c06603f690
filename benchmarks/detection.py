"""How soon a server that begins to lie is found, and what the checks cost in throughput.

The first table follows the client's policy over many generations, without servers: how many positions a client has had
computed until a check shows a lie. The second generates with and without checks, in turns, through two real servers of
the same blocks, and compares the processor time that it takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from random import Random

import psutil
from common import decode_tokens_per_s, json_row, median_ratio, random_ids, take_turns, write_json
from local_servers import local_servers
from make_model import DEFAULT_OUTPUT, SHAPES, make_model

from swarm_client import DistributedModel
from swarm_client.core.config import CHECK_SHARE
from swarm_client.verification.checker import checker_of
from swarm_client.verification.session_checks import FIRST_OUTPUTS

PROMPT, NEW = 64, 128  # tokens of a generation
ALL = 1.0  # of the positions, to measure the price: as much as can be checked, one check at a time
SHARES = 0.01, CHECK_SHARE, 0.1


def positions_until_found(share: float, lying: float, chance: Random) -> tuple[int, int, int]:
    """Positions computed, lies told, and positions computed again for checks, until a check finds a lie.

    The server has passed its first check. It lies in a share of its answers from then on, and checks find any lie
    among the outputs that the session has kept: those of servers that round alike.
    """
    served = lies = again = 0
    while True:
        kept = 0
        for length in (PROMPT, *range(PROMPT + 1, PROMPT + NEW + 1)):
            new = PROMPT if length == PROMPT else 1
            served += new
            told = sum(chance.random() < lying for _ in range(FIRST_OUTPUTS if new > 1 else 1))
            kept, lies = kept + told, lies + told
            if chance.random() * length < share * new:
                again += length
                if kept:
                    return served, lies, again


def detection_rows(rounds: int) -> list[dict]:
    chance, rows = Random(0), []
    for lying in (1.0, 0.1):
        for share in SHARES:
            found = sorted(positions_until_found(share, lying, chance) for _ in range(rounds))
            served = [positions for positions, _, _ in found]
            median, late = statistics.median(served), served[int(0.95 * rounds)]
            rows.append(
                json_row(
                    f"lies in {lying:.0%} of answers, share {share:.0%}",
                    median,
                    p95=late,
                    generations=median / (PROMPT + NEW),
                    recomputed=sum(again for _, _, again in found) / sum(served),
                )
            )
    return rows


def price_row(model: str, models: Path, rounds: int, sessions: int) -> dict:
    """What checks take of the servers' and the client's processor time, as a share of what generating takes without.

    Small machines are too noisy for a hundredth: as much is checked as can be, and the difference is multiplied by the
    default share over the one that was checked. Processor time, because other programs take less of it than of the time
    that passes.
    """
    path = make_model(model, models)
    blocks = f"0:{SHAPES[model]['num_hidden_layers']}"
    swarm, cores = f"detection-{os.getpid()}", sorted(os.sched_getaffinity(0))
    options = ["--model", str(path), "--quant", "int8", "--log-level", "warning"]
    with local_servers(swarm, [blocks, blocks], options, [cores[0], cores[-1]]) as servers:
        clients = {
            name: DistributedModel.from_pretrained(str(path), swarm=swarm, check_share=share)
            for name, share in (("without", 0.0), ("with", ALL))
        }
        processes = [psutil.Process(server.pid) for server in servers] + [psutil.Process()]

        def cpu_ms_per_token(name: str) -> float:
            def cpu_s() -> float:
                return sum(sum(process.cpu_times()[:2]) for process in processes)

            before = cpu_s()
            decode_tokens_per_s(clients[name], [random_ids(PROMPT) for _ in range(sessions)], NEW)
            return 1000 * (cpu_s() - before) / (sessions * NEW)

        for name in clients:
            cpu_ms_per_token(name)  # first answers are checked here
        checker = checker_of(clients["with"].blocks.swarm)
        num_first = checker.num_checked
        measured = take_turns(rounds, {name: lambda name=name: cpu_ms_per_token(name) for name in clients})
        share = (checker.num_checked - num_first) / (rounds * sessions * (PROMPT + NEW))
        for client in clients.values():
            client.close()
    with_, without = (statistics.median(measured[name]) for name in ("with", "without"))
    price = (median_ratio(measured["with"], measured["without"]) - 1) * CHECK_SHARE / share
    return json_row(
        f"processor time of checks, share of it, {sessions} sessions, {model}, int8",
        price,
        0.02,
        at_most=True,
        cpu_ms_per_token=with_,
        cpu_ms_per_token_without=without,
        share=share,
        rounds=measured,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench-1b", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--no-price", action="store_true", help="the first table only, which needs no servers")
    parser.add_argument("--quick", action="store_true", help="bench-tiny, one round: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.quick:
            args.model, args.rounds, args.sessions, args.models = "bench-tiny", 1, 2, Path(directory)
        rows = detection_rows(200 if args.quick else 600)
        print(f"{'positions computed until found':44} {'median':>8} {'95 %':>8} {'recomputed':>10}")
        for row in rows:
            print(f"{row['name']:44} {row['measured']:8.0f} {row['p95']:8.0f} {row['recomputed']:10.1%}")
        if not args.no_price:
            rows.append(price_row(args.model, args.models, args.rounds, args.sessions))
            row = rows[-1]
            print(f"{row['name']}: {row['measured']:.2%} (with {row['share']:.0%} of positions checked)")
    if args.json:
        write_json(args.json, vars(args), rows=rows)


if __name__ == "__main__":
    main()
