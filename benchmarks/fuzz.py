"""Messages, records and files, changed at random, beside an honest client: is one answered wrongly, is anything left?

    python benchmarks/fuzz.py --messages 1000000 --seed 7 [--json FILE]      # a night
    python benchmarks/fuzz.py --quick                                        # 3000 messages
    python benchmarks/fuzz.py --seed 7 --only 1234                           # one case alone

Every case follows from the seed and its number. Ends with exit code 1 if one was answered by anything but a refusal or
what is right, if the honest client got other tokens or an error, if the server logged a traceback, or if its memory,
threads, files or sessions did not come back.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import json_row, write_json
from repository import ROOT
from rich.console import Console
from rich.table import Table

from swarm_client.core import background
from tests.attack.attacked import Attacked, attacked
from tests.attack.fuzzed import fuzzer_of
from tests.attack.fuzzing.fuzzer import Fuzzer

QUICK_MESSAGES = 3000
SLICE = 5000  # messages, after which the server's log is looked at
assert ROOT.is_dir()


def fuzz(fuzzer: Fuzzer, target: Attacked, num_messages: int, console: Console) -> list[str]:
    """Returns what the server has complained of."""
    number = 0
    while (left := num_messages - fuzzer.num_messages) > 0:
        first, number = number, background.run(fuzzer.run(min(SLICE, left), number))
        console.print(f"{fuzzer.num_messages} messages, {len(fuzzer.failures)} wrong answers", style="dim")
        log = target.server.stderr
        if "Traceback" in log:
            last_lines = log[log.rindex("Traceback") :].strip()
            return [f"numbers {first} to {number - 1}: the server logged {last_lines}"]
        if fuzzer.gave_up:
            return []
    return []


def run(args: argparse.Namespace, console: Console) -> tuple[Fuzzer, list[str], int, list[str]]:
    """The fuzzer, what the server complained of, how many honest generations there were, and what was wrong besides."""
    complaints: list[str] = []
    num_generations, wrong = 0, []
    with (
        tempfile.TemporaryDirectory() as directory,
        attacked(Path(directory)) as target,
        fuzzer_of(target, args.seed) as fuzzer,
    ):
        if args.only is not None:
            console.print(background.run(fuzzer.run_one(args.only)))
            return fuzzer, ["the server logged a traceback"] * ("Traceback" in target.server.stderr), 0, []
        try:
            with target.while_an_honest_client_generates() as generations:
                complaints = fuzz(fuzzer, target, args.messages, console)
        except AssertionError as error:
            wrong.append(str(error))
        num_generations = len(generations)
    return fuzzer, complaints, num_generations, wrong


def table_of(fuzzer: Fuzzer) -> Table:
    table = Table("kind", "messages", "answers", "slowest, s", "of number")
    for kind, tally in sorted(fuzzer.tallies.items()):
        answers = ", ".join(f"{count} {answer}" for answer, count in tally.answers.most_common())
        table.add_row(kind, str(tally.messages), answers, f"{tally.slowest_s:.2f}", str(tally.slowest_number))
    return table


def rows_of(fuzzer: Fuzzer, complaints: list[str], num_generations: int, wrong: list[str]) -> list[dict[str, Any]]:
    kinds = [
        json_row(kind, tally.slowest_s, messages=tally.messages, answers=tally.answers, number=tally.slowest_number)
        for kind, tally in sorted(fuzzer.tallies.items())
    ]
    return [
        *kinds,
        json_row("wrong answers", len(fuzzer.failures), 0, at_most=True, found=list(map(str, fuzzer.failures))),
        json_row("tracebacks", len(complaints), 0, at_most=True, found=complaints),
        json_row("not as before", len(wrong), 0, at_most=True, found=wrong),
        json_row("honest generations", num_generations),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this case alone")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MESSAGES} messages")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.messages = QUICK_MESSAGES
    console = Console(width=120, soft_wrap=True)
    found = run(args, console)
    console.print(table_of(found[0]))
    fuzzer, complaints, num_generations, wrong = found
    for problem in (*map(str, fuzzer.failures), *complaints, *wrong):
        console.print(f"WRONG {problem}", markup=False)
    console.print(f"{fuzzer.num_messages} messages beside {num_generations} honest generations")
    if args.json:
        write_json(args.json, vars(args), rows=rows_of(*found))
    sys.exit(bool(fuzzer.failures or complaints or wrong))


if __name__ == "__main__":
    main()
