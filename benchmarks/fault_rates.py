"""How fast text comes when every server fails with some probability at every token.

The experiment of "Distributed Inference and Fine-tuning of Large Language Models Over The Internet" (arXiv 2312.08361).
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from faults import (
    Generation,
    Replicas,
    Tally,
    console,
    generation,
    model_path,
    random_prompts,
    results_table,
    undisturbed,
)
from transformers import PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.sessions.session import RemoteSession

PROMPT = 16
TARGETS = {1e-4: 0.97, 1e-3: 0.9, 1e-2: 0.6}  # of the speed without failures
CLIENTS = {
    "recovers": {},
    "with copies": {"standby": True},
    "starts again": {"recovery_timeout_s": 0.0},
}


class _TimeIsUp(Exception):
    pass


class Failures:
    """Before every token, every server of the chain dies with this probability.

    Another takes its place after the next token. The clock stands still until that one is ready: elsewhere it would
    start on a machine of its own, here it takes both cores from those that are measured.
    """

    def __init__(self, replicas: Replicas, probability: float, seed: int, cap_s: float = float("inf")) -> None:
        self._replicas, self._probability = replicas, probability
        self._chance = random.Random(f"{seed} {probability}")
        self._cap_s = cap_s
        self._start = time.perf_counter()
        self._dead: list[LocalServer] = []
        self.num_killed = 0
        self.most_tokens = 0
        self.starting_s = 0.0

    @property
    def seconds(self) -> float:
        """Without those in which servers started."""
        return time.perf_counter() - self._start - self.starting_s

    def __call__(self, session: RemoteSession, num_tokens: int) -> None:
        self.most_tokens = max(self.most_tokens, num_tokens)
        self.replace_dead()
        if self.seconds > self._cap_s:
            raise _TimeIsUp
        for hop in session.hops if num_tokens else ():
            if self._chance.random() < self._probability:
                self._dead.append(self._replicas.find(hop.server.peer_id))
                self._dead[-1].kill()
                self.num_killed += 1

    def replace_dead(self) -> None:
        if not self._dead:
            return
        start = time.perf_counter()
        for server in self._dead:
            self._replicas.replace(server)
        self._dead.clear()
        self._replicas.wait_ready()
        self.starting_s += time.perf_counter() - start


@dataclass(frozen=True)
class Rate:
    """One client at one failure rate. ``steps_per_s`` counts the tokens of the finished text, or none."""

    quant: str
    client: str
    probability: float
    steps_per_s: float
    seconds: float
    starting_s: float  # not among these seconds
    finished: bool
    num_tokens: int  # that were reached, at most
    num_attempts: int
    num_killed: int
    recoveries: int
    from_copy: int
    replayed_tokens: int
    stall_s: float
    waits: int


def measure_rates(args: argparse.Namespace, cluster: LocalCluster) -> tuple[Any, Tally]:
    quant = args.quant[-1]
    path = model_path(args.model, args.models)
    (prompt,) = random_prompts(path, (PROMPT,), args.seed)
    rates, tally = [], Tally()
    with Replicas(cluster, path, quant, *args.server_options.split()) as replicas:
        with replicas.client() as model:
            limit = model.blocks.max_positions
            tokens = args.tokens if limit is None else min(args.tokens, limit - PROMPT)
            if tokens < args.tokens:
                console.print(f"{tokens} tokens instead of {args.tokens}: the model has {limit} positions")
            right = undisturbed(model, prompt, tokens)
        for probability in args.rates:
            for client, options in CLIENTS.items():
                if client == "starts again" and not probability:
                    continue  # the same as one that recovers
                with replicas.client(**options) as model:
                    cap_s = args.cap if client == "starts again" else float("inf")
                    failures = Failures(replicas, probability, args.seed, cap_s)
                    rate = run(model, prompt, right, failures, client, probability, tally, quant)
                rates.append(rate)
                failures.replace_dead()
                console.print(
                    f"{probability:g}, {client}: {rate.num_killed} killed, {rate.seconds:.1f} s "
                    f"and {rate.starting_s:.1f} s in which servers started, "
                    f"{rate.num_attempts} {'attempt' if rate.num_attempts == 1 else 'attempts'}",
                )
    show(rates, args.cap)
    console.print(f"{tally}")
    return [asdict(rate) for rate in rates], tally


def run(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    right: list[int],
    failures: Failures,
    client: str,
    probability: float,
    tally: Tally,
    quant: str,
) -> Rate:
    """Only a client that starts again may fail."""
    attempts, result = 0, Generation()
    try:
        while True:
            attempts += 1
            with generation(model, prompt, len(right), failures) as result:
                pass
            if not result.error or client != "starts again":
                break
    except _TimeIsUp:
        result.error = "the time is up"
    seconds = failures.seconds
    if client != "starts again" or not result.error:
        tally.add(model, quant, prompt, result, right)
    stats = result.stats
    return Rate(
        quant=quant,
        client=client,
        probability=probability,
        steps_per_s=0.0 if result.error else len(right) / seconds,
        seconds=seconds,
        starting_s=failures.starting_s,
        finished=not result.error,
        num_tokens=failures.most_tokens,
        num_attempts=attempts,
        num_killed=failures.num_killed,
        recoveries=stats.recoveries,
        from_copy=stats.standbys_used,
        replayed_tokens=stats.replayed_tokens,
        stall_s=stats.stall_s,
        waits=stats.waits,
    )


def show(rates: list[Rate], cap_s: float) -> None:
    found = {(rate.probability, rate.client): rate for rate in rates}
    base = {client: found.get((0.0, client)) or found.get((0.0, "recovers")) for client in CLIENTS}
    title = "Steps per second (relative to no failures, part of the time in stalls)"
    table = results_table(title, "rate", "killed", *CLIENTS, "target")
    for probability in dict.fromkeys(rate.probability for rate in rates):
        cells = []
        for client in CLIENTS:
            rate = found.get((probability, client)) or found[0.0, "recovers"]
            if not rate.finished:
                cells.append(f"not in {cap_s:g} s")
                continue
            relative = "" if base[client] is None else f"{rate.steps_per_s / base[client].steps_per_s:.2f}, "
            cells.append(f"{rate.steps_per_s:.1f} ({relative}{rate.stall_s / rate.seconds:.0%})")
        target = TARGETS.get(probability)
        killed = str(found[probability, "recovers"].num_killed)
        table.add_row(f"{probability:g}", killed, *cells, "" if target is None else f"≥ {target:g}")
    console.print(table)
