"""What attacks cost an honest client of the same server: its longest wait for a token, failed generations, memory.

    python benchmarks/attack.py [--quick] [--only NAME …] [--json FILE]

The attacks are those of ``tests/attack``, where ``attack`` names them; each is repeated for a while. The longest wait
of the client is compared with that of a generation when nothing else happens, the median of some. Ends with exit code 1
if it waited more than two seconds longer, if a generation failed, or if the server did not withstand an attack.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import json_row, write_json
from repository import ROOT
from rich.console import Console
from rich.table import Table

from tests.attack.attacked import Attacked
from tests.attack.attacks import ATTACKS, Attack, Servers
from tests.attack.honest import Generation
from tests.attack.resources import forget_peak, peak_bytes

MOST_LOST_S = 2.0
SECONDS, QUIET_GENERATIONS = 20.0, 40
QUICK_SECONDS, QUICK_GENERATIONS = 2.0, 10


@dataclass
class Loss:
    """What one attack did.

    Attributes:
        quiet_s: the median of the longest waits of generations when nothing else happens.
        problems: of the attack, and of the honest client's generations.
    """

    name: str
    quiet_s: float
    generations: Sequence[Generation] = ()
    times: int = 0
    peak_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        return max((generation.longest_wait_s for generation in self.generations), default=0.0)

    @property
    def num_failed(self) -> int:
        return sum(bool(generation.problem) for generation in self.generations)

    @property
    def met(self) -> bool:
        return self.longest_s - self.quiet_s <= MOST_LOST_S and not self.problems

    def row(self) -> dict[str, Any]:
        """``measured``: seconds that the client waited longer; ``beside``: its wait when nothing else happens."""
        more = {"longest_s": self.longest_s, "failed": self.num_failed, "generations": len(self.generations)}
        lost_s = self.longest_s - self.quiet_s
        row = json_row(self.name, lost_s, MOST_LOST_S, beside=self.quiet_s, at_most=True, times=self.times, **more)
        return row | {"met": "yes" if self.met else "no", "peak_bytes": self.peak_bytes, "problems": self.problems}


def known_attacks() -> list[Attack]:
    """Those of every test module of the suite."""
    for path in sorted((ROOT / "tests" / "attack").glob("test_*.py")):
        importlib.import_module(f"tests.attack.{path.stem}")
    return list(ATTACKS.values())


def losses(attacks: Sequence[Attack], seconds: float, num_quiet: int) -> Iterator[Loss]:
    """Those on servers of the same kind are tried one after the other on the same ones."""
    by_servers: dict[Servers, list[Attack]] = {}
    for attack in attacks:
        by_servers.setdefault(attack.servers, []).append(attack)
    for servers, group in by_servers.items():
        with tempfile.TemporaryDirectory() as directory, servers(Path(directory)) as target:
            target.honest.generate()
            quiet_s = statistics.median(target.honest.generate().longest_wait_s for _ in range(num_quiet))
            for attack in group:
                yield loss_by(attack, target, quiet_s, seconds)


def loss_by(attack: Attack, target: Attacked, quiet_s: float, seconds: float) -> Loss:
    loss = Loss(attack.name, quiet_s)
    forget_peak(target.server)
    end = time.monotonic() + seconds
    try:
        with target.while_an_honest_client_generates() as loss.generations:
            while not loss.times or time.monotonic() < end:
                loss.times += 1
                attack.run(target)
    except AssertionError as error:
        loss.problems.append(str(error).split("\n")[0] or "it was not refused")
    loss.peak_bytes = peak_bytes(target.server)
    loss.problems += [generation.problem for generation in loss.generations if generation.problem]
    return loss


def table_of(measured: Sequence[Loss]) -> Table:
    table = Table("attack", "times", "longest wait, s", "quiet, s", "failed", "peak memory, MB", "")
    for loss in measured:
        waits = f"{loss.longest_s:.2f}", f"{loss.quiet_s:.2f}"
        failed = f"{loss.num_failed} of {len(loss.generations)}"
        met = "ok" if loss.met else "FAIL"
        table.add_row(loss.name, str(loss.times), *waits, failed, f"{loss.peak_bytes / 1e6:.0f}", met)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks by their names")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for which an attack is repeated")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS:g} seconds of each attack")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    attacks = known_attacks()
    if unknown := set(args.only or ()) - {attack.name for attack in attacks}:
        parser.error(f"no attack is called {', '.join(unknown)}: there are {', '.join(ATTACKS)}")
    attacks = [attack for attack in attacks if not args.only or attack.name in args.only]
    seconds, num_quiet = (QUICK_SECONDS, QUICK_GENERATIONS) if args.quick else (args.seconds, QUIET_GENERATIONS)
    measured = list(losses(attacks, seconds, num_quiet))
    console = Console(width=120, soft_wrap=True)
    console.print(table_of(measured))
    for loss in measured:
        for problem in loss.problems:
            console.print(f"FAIL {loss.name}: {problem}", markup=False)
    if args.json:
        write_json(args.json, vars(args), rows=[loss.row() for loss in measured])
    sys.exit(not all(loss.met for loss in measured))


if __name__ == "__main__":
    main()
