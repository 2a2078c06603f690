"""How many texts are wrong before a server that lies is banned, and what the checks cost.

The first tables follow the client's policy over many texts, without servers, beside clients that share evidence and no
doubts. The last row generates with and without checks, in turns, through two real
servers of the same blocks, and compares the processor time that it takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil
from common import decode_tokens_per_s, json_row, median_ratio, random_ids, take_turns, write_json
from local_servers import local_servers
from make_model import DEFAULT_OUTPUT, SHAPES, make_model

from swarm_client import DistributedModel
from swarm_client.core.config import CHECK_SHARE
from swarm_client.verification.checker import checker_of
from swarm_client.verification.risk import (
    DOUBT_CHECKS,
    SECOND_OPINIONS,
    CheckBudget,
    CheckHistory,
    check_cost,
    share_of,
    work_of,
)

PROMPT, NEW = 64, 128  # tokens of a generation
ALL = 1.0  # of the work, to measure the price: as much as can be checked, one check at a time
STEP_S = 0.05
SOON = 8  # steps, among which a text's first check may come
MOST_TEXTS = 200  # of all clients: a liar that is not found by then is not found
PRICES = {"GPU": 0.013, "CPU": 0.13}  # of a position in a prompt, in steps: bench-8b on an H100, bench-1b on two cores
CLIENTS = 1, 4, 16


@dataclass(frozen=True)
class Liar:
    """A server that lies; it computes all texts until it is banned.

    Attributes:
        lies: whether it lies at a step; of the texts that this client had from it before, the steps it has computed in
            all, the number of the step in its text, and a random number.
        signs: chance that it signs a lie when it is asked to, so that all clients hear of it.
        colluding: of the ``others`` that hold the blocks, those that confirm its lies.
    """

    lies: Callable[[int, int, int, float], bool]
    signs: float = 1.0
    colluding: int = 0
    others: int = 3


LIARS = {
    "always": Liar(lambda _texts, _steps, _step, _chance: True),
    "10 % of steps": Liar(lambda _texts, _steps, _step, chance: chance < 0.1, signs=0.96),
    "10 % of steps, signs no lie": Liar(lambda _texts, _steps, _step, chance: chance < 0.1, signs=0.0),
    "turncoat after 1000 steps": Liar(lambda _texts, steps, _step, _chance: steps > 1000),
    "late positions only": Liar(lambda _texts, _steps, step, _chance: step > NEW // 2, signs=0.0),
    "unknown clients only, 10 %": Liar(lambda texts, _steps, _step, chance: not texts and chance < 0.1, signs=0.0),
    "2 of 6 together, always": Liar(lambda _texts, _steps, _step, _chance: True, 0.0, colluding=1, others=5),
    "2 of 3 together, always": Liar(lambda _texts, _steps, _step, _chance: True, 0.0, colluding=1, others=2),
}


class Policy:
    """What ``swarm_client.verification`` does.

    Attributes:
        is_heard: other clients doubt the server.
    """

    def __init__(self, price: float, chance: Random) -> None:
        self.price, self.chance, self.spent = price, chance, 0.0
        self.budget, self.num_passed, self.steps = CheckBudget(chance.random), 0, 0
        self.is_heard, self.num_heard = False, 0  # checks since a doubt was heard

    def begin(self) -> None:
        """A text begins."""
        self.steps_left, self.is_owed = self.chance.randrange(SOON), True

    def draws(self, new: int, length: int) -> bool:
        self.steps += 1
        history = CheckHistory(self.num_passed, self.steps * STEP_S)
        work, cost = work_of(1, new, self.price), check_cost(length, self.price)
        is_due = self.is_owed and self.steps_left <= 0
        self.steps_left -= 1
        is_heard = self.is_heard and self.num_heard < DOUBT_CHECKS
        is_drawn = self.budget.draws(share_of(history, CHECK_SHARE), work, cost, is_due, is_heard=is_heard)
        self.is_owed &= not is_drawn
        self.num_heard += is_drawn and is_heard
        self.spent += cost * is_drawn
        return is_drawn

    def passed(self) -> None:
        """A check found nothing."""
        self.num_passed += 1

    def convicts(self, liar: Liar) -> bool:
        """Whether a check of a text with a lie bans the liar.

        Three honest ones that are there outvote two liars; two of three win, or are seen to differ.
        """
        is_honest = self.chance.random() * liar.others < liar.others - liar.colluding
        is_seen = is_honest or self.chance.random() < SECOND_OPINIONS
        return is_seen and (not liar.colluding or liar.others - liar.colluding >= 3)


@dataclass
class Client:
    policy: Policy
    num_texts: int = 0
    is_new: bool = True  # the server's first answers are still to be checked
    has_banned: bool = False
    work: float = 0.0
    num_checked: int = 0


def text(client: Client, liar: Liar, steps: int, chance: Random) -> bool:
    """One text through the liar. Returns whether something wrong was shown."""
    policy, kept, is_wrong, is_checked = client.policy, False, False, False
    policy.begin()
    for step, length in enumerate((PROMPT, *range(PROMPT + 1, PROMPT + NEW + 1))):
        new = 1 if step else PROMPT
        client.work += work_of(1, new, policy.price)
        told = any(liar.lies(client.num_texts, steps + step, step, chance.random()) for _ in range(1 if step else 2))
        kept |= told
        is_drawn = policy.draws(new, length) or client.is_new
        if is_drawn:
            is_checked = True
            if kept and policy.convicts(liar):
                client.has_banned = True
                is_wrong |= told and not client.is_new  # what is held back is taken back
                break
            policy.passed()
            client.is_new = False
        is_wrong |= told
    client.num_texts += 1
    client.num_checked += is_checked
    return is_wrong


def wrong_texts(liar: Liar, price: float, num_clients: int, chance: Random, *, tells: bool) -> int:
    """Texts of all clients that were wrong until all have banned the liar, or ``MOST_TEXTS`` have been written.

    ``tells``: clients share their doubts too, and not just the evidence. News takes no time.
    """
    clients, num_wrong, num_texts = [Client(Policy(price, chance)) for _ in range(num_clients)], 0, 0
    is_shown = is_doubted = False
    while num_texts < MOST_TEXTS and not all(client.has_banned for client in clients):
        for client in clients:
            client.has_banned |= is_shown and client.num_texts > 0
            if client.has_banned:
                continue
            client.policy.is_heard = is_doubted
            num_wrong += text(client, liar, num_texts * (NEW + 1), chance)
            num_texts += 1
            is_shown |= client.has_banned and chance.random() < liar.signs
            is_doubted |= tells and client.has_banned
    return num_wrong


HONEST = Liar(lambda _texts, _steps, _step, _chance: False)


def honest_rows(price: float, kind: str, num_texts: int, chance: Random) -> list[dict]:
    """What honest servers with a good record pay, also while somebody doubts them all as often as is heard."""
    rows = []
    for name, num_again in (("", 0), (", all doubted always", 1)):
        client = Client(Policy(price, chance))
        client.policy.is_heard = bool(num_again)
        for number in range(20 + num_texts):
            if number == 20:
                client.work = client.policy.spent = client.num_checked = 0
            if num_again:
                client.policy.num_heard = 0
            text(client, HONEST, 0, chance)
        spent = client.policy.spent / client.work
        rows.append(json_row(f"price for honest servers{name}, {kind}", spent, 0.03, at_most=True))
        rows.append(json_row(f"texts with a check{name}, {kind}", client.num_checked / num_texts))
    return rows


def simulated_rows(rounds: int) -> list[dict]:
    chance, rows = Random(0), []
    for kind, price in PRICES.items():
        for name, liar in LIARS.items():
            for num_clients in CLIENTS:
                alone, now = (
                    statistics.mean(wrong_texts(liar, price, num_clients, chance, tells=tells) for _ in range(rounds))
                    for tells in (False, True)
                )
                label = f"wrong texts, {name}, {num_clients} clients, {kind}"
                rows.append(json_row(label, now, beside=alone, ratio=now / alone if alone else None))
        rows += honest_rows(price, kind, 50 * rounds, chance)
    return rows


def price_row(model: str, models: Path, rounds: int, sessions: int) -> dict:
    """What checks take of the servers' and the client's processor time, as a share of what generating takes without.

    Small machines are too noisy for a hundredth: as much is checked as can be, and the difference is multiplied by the
    default share of the work over the one that the policy has spent. Processor time, because other programs take less
    of it than of the time that passes.
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
        positions = (checker.num_checked - num_first) / (rounds * sessions)
        price_of_position = min(1.0, checker.price * sessions)
        share = positions * price_of_position / (work_of(1, PROMPT, price_of_position) + NEW)
        for client in clients.values():
            client.close()
    with_, without = (statistics.median(measured[name]) for name in ("with", "without"))
    price = (median_ratio(measured["with"], measured["without"]) - 1) * CHECK_SHARE / share
    return json_row(
        f"processor time of checks, share of it, {sessions} sessions, {model}, int8",
        price,
        0.03,
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
    parser.add_argument("--no-price", action="store_true", help="the first tables only, which need no servers")
    parser.add_argument("--quick", action="store_true", help="bench-tiny, one round: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.quick:
            args.model, args.rounds, args.sessions, args.models = "bench-tiny", 1, 2, Path(directory)
        rows = simulated_rows(4 if args.quick else 40)
        print(f"{'':60} {'now':>8} {'no doubts':>9}")
        for row in rows:
            beside = "" if row["beside"] is None else f"{row['beside']:9.1f}"
            print(f"{row['name']:60} {row['measured']:8.3g} {beside}")
        if not args.no_price:
            rows.append(price_row(args.model, args.models, args.rounds, args.sessions))
            row = rows[-1]
            print(f"{row['name']}: {row['measured']:.2%} (with {row['share']:.0%} of the work checked)")
    if args.json:
        write_json(args.json, vars(args), rows=rows)


if __name__ == "__main__":
    main()
