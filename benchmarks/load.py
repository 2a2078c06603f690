"""Many clients at once for a while, some of which vanish or change their minds: does anybody else notice?

    python benchmarks/load.py                                   # bench-tiny, 64 sessions, two minutes
    python benchmarks/load.py --quick                           # 16 sessions, 20 seconds
    python benchmarks/load.py --model bench-1b --quant int8 --json load.json

Ends with exit code 1 if an honest session saw an error or got other tokens than it would have alone, if room for keys
and values is lost, if a server's memory grows, or if a server or the client logs that something failed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from common import QUANT_NAMES, fleet, json_row, load_local, write_json
from load_clients import MAX_PROMPT, Request, Sessions, VanishingClients, random_rows, wait_until
from local_servers import LocalServer
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from transformers import PreTrainedModel

from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_gateway.monitor.status import read_status
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.net.identity import Identity
from swarm_protocol.net.tls import ClientCredentials, pinned_channel
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.rpc.stubs import BLOCKS, ServiceStub
from swarm_protocol.wire.constants import CLIENT_OPTIONS

THREADS_PER_VANISHING_CLIENT = 4
ROOM_PER_SESSION = 1024  # tokens; a batch or a beam search takes up to 4 × 348
FILL_ROWS = 8
SAMPLE_S = 1.0
SAMPLES = 5  # whose median counts, of memory at the beginning and at the end
MAX_GROWTH = 0.05
NEAR_TIE = 1e-4  # logits, or a beam's log probability per token: rounding decides
ROOM_TIMEOUT_S, STOP_TIMEOUT_S, FILL_TIMEOUT_S, ASK_TIMEOUT_S = 30.0, 120.0, 60.0, 10.0
SHOWN = 5  # messages of many
QUICK = {"sessions": 16, "seconds": 20.0, "warm_up": 8.0}


@dataclass(frozen=True)
class Fact:
    """Something that must be so."""

    what: str
    holds: bool
    found: str


def free_room(records: list[ServerRecord]) -> list[int]:
    """KV tokens that each server has left, as it says itself."""
    return [background.run(_describe(record)).cache_tokens_left for record in records]


@cache
def _credentials() -> ClientCredentials:
    return ClientCredentials(Identity.generate())


async def _describe(record: ServerRecord) -> pb.ServerRecord:
    address, fingerprint = record.addresses[0], record.tls_fingerprint
    channel = await pinned_channel(_credentials(), address, fingerprint, CLIENT_OPTIONS, ASK_TIMEOUT_S)
    try:
        return await ServiceStub(BLOCKS, channel).Describe(pb.DescribeRequest(), timeout=ASK_TIMEOUT_S)
    finally:
        await channel.close()


def resident_bytes(server: LocalServer) -> int:
    """0 if the process is gone."""
    try:
        pages = Path(f"/proc/{server.pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * 4096


def fill_caches(model: PreTrainedModel, num_tokens: int, timeout_s: float) -> None:
    """Servers keep what they computed for reuse until room is short: memory can be flat only after that."""
    chance = random.Random("fill")
    deadline = time.monotonic() + timeout_s
    for _ in range(-(-num_tokens // (FILL_ROWS * MAX_PROMPT))):
        if time.monotonic() > deadline:
            return
        ids = random_rows(chance, FILL_ROWS, MAX_PROMPT)
        Request("fill", ids, torch.ones_like(ids), 1).generate(model)


def wrong_answers(reference: PreTrainedModel, answers: list[tuple[Request, torch.Tensor]]) -> list[str]:
    """Answers that differ from the reference's, unless rounding decided."""
    wrong = []
    for request, answer in answers:
        expected = request.generate(reference)
        for row, (tokens, right) in enumerate(zip(answer, expected, strict=True)):
            if not torch.equal(tokens, right) and not near_tie(reference, request, row, tokens, right):
                size = request.input_ids.shape[1]
                wrong.append(f"{request.kind}, prompt of {size}: {tokens.tolist()} instead of {right.tolist()}")
    return wrong


@torch.inference_mode()
def near_tie(reference: PreTrainedModel, request: Request, row: int, tokens: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both are as good as each other: where they first differ, or as a whole if beams were searched."""
    prompt = request.input_ids[row][request.attention_mask[row].bool()]
    length = len(right)

    def logits(new: torch.Tensor) -> torch.Tensor:  # [new tokens, vocabulary]
        return reference(torch.cat([prompt, new])[None]).logits[0, -length - 1 : -1]

    if request.num_beams == 1:
        first = int((tokens != right).nonzero()[0])
        choices = logits(right)[first]
        return bool(abs(choices[tokens[first]] - choices[right[first]]) <= NEAR_TIE)
    scores = [logits(new).log_softmax(-1).gather(1, new[:, None]).sum() for new in (tokens, right)]
    return bool(abs(scores[0] - scores[1]) <= NEAR_TIE * length)


class MemoryWatch:
    """Resident memory of every server, once a second."""

    def __init__(self, servers: Sequence[LocalServer]) -> None:
        self._servers = servers
        self.samples: list[tuple[float, list[int]]] = []  # seconds since the start, bytes

    def watch(self, seconds: float) -> None:
        start = time.monotonic()
        while (passed := time.monotonic() - start) < seconds:
            self.samples.append((passed, [resident_bytes(server) for server in self._servers]))
            time.sleep(SAMPLE_S)

    def first_and_last(self, warm_up_s: float) -> list[tuple[float, float]]:
        """MB of every server, medians of some samples."""
        warm = [sizes for passed, sizes in self.samples if passed >= warm_up_s] or [self.samples[-1][1]]
        parts = warm[:SAMPLES], warm[-SAMPLES:]
        first, last = ([statistics.median(sizes) / 1e6 for sizes in zip(*part, strict=True)] for part in parts)
        return list(zip(first, last, strict=True))


@dataclass
class Outcome:
    """What the load test found."""

    honest: Sessions
    vanishing: VanishingClients
    tokens_per_s: float
    memory_mb: list[tuple[float, float]]  # of every server: first and last
    room: tuple[list[int], list[int]]  # before and after
    num_checked: int
    wrong: list[str]
    complaints: Counter[str]  # of the servers
    warnings: Counter[str]  # of the client, such as servers it gave up although none fails

    def facts(self) -> list[Fact]:
        honest, killed = self.honest, self.vanishing.num_killed
        growth = [last / first - 1 if first else 1.0 for first, last in self.memory_mb]
        sizes = ", ".join(f"{first:.0f} → {last:.0f} MB" for first, last in self.memory_mb)
        errors = honest.errors + self.vanishing.errors
        before, after = self.room
        return [
            Fact("clients finish", bool(honest.finished), f"{len(honest.finished)} sessions"),
            Fact("clients cancel", honest.num_cancelled > 0, f"{honest.num_cancelled} sessions"),
            Fact("clients vanish", killed > 0, f"{killed} processes killed"),
            Fact("no errors", not errors, counted(Counter(errors))),
            Fact("servers have nothing to complain of", not self.complaints, counted(self.complaints)),
            Fact("nor has the client", not self.warnings, counted(self.warnings)),
            Fact(
                "tokens as alone",
                self.num_checked > 0 and not self.wrong,
                f"{self.num_checked} sessions compared, wrong: {counted(Counter(self.wrong))}",
            ),
            Fact("KV room is back", before == after, f"{before} → {after} tokens"),
            Fact("servers live", all(last for _, last in self.memory_mb), f"{len(growth)} servers"),
            Fact("memory is flat", max(growth) <= MAX_GROWTH, f"{sizes} ({max(growth):+.1%})"),
        ]


def counted(messages: Counter[str]) -> str:
    shown = [f"{count} × {message}" for message, count in messages.most_common(SHOWN)]
    return "; ".join([*shown, *(["…"] if len(messages) > SHOWN else [])]) or "none"


class Warnings(logging.Handler):
    """Counts what this process logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages[record.getMessage()] += 1


def run(args: argparse.Namespace) -> tuple[Outcome, MemoryWatch]:
    path = make_model(args.model, args.models)
    warnings = Warnings()
    logging.getLogger("swarm_client").addHandler(warnings)
    room_tokens = args.sessions * ROOM_PER_SESSION
    num_vanishing = max(1, args.sessions // (4 * THREADS_PER_VANISHING_CLIENT))
    options = ["--cache-tokens", str(room_tokens), *args.server_options.split()]
    with fleet(path, args.servers, args.quant, *options) as servers, servers.client() as model:
        (status,) = background.run(read_status(ClientConfig(swarm=servers.swarm))).models
        records = [server.record for server in status.servers]
        room_before = free_room(records)
        vanishing = VanishingClients(str(path), servers.swarm, THREADS_PER_VANISHING_CLIENT)
        vanishing.start(num_vanishing)
        fill_caches(model, room_tokens, FILL_TIMEOUT_S)
        wait_until(lambda: bool(vanishing.num_killed or vanishing.errors), STOP_TIMEOUT_S)
        honest = Sessions(model, args.seed)
        honest.start(max(1, args.sessions - num_vanishing * THREADS_PER_VANISHING_CLIENT))
        memory = MemoryWatch(servers.servers)
        memory.watch(args.seconds)
        tokens_per_s = sum(answer.numel() for _, answer in honest.finished) / args.seconds
        honest.stop(STOP_TIMEOUT_S)
        vanishing.stop()
        gc.collect()
        wait_until(lambda: free_room(records) == room_before, ROOM_TIMEOUT_S, poll_s=0.5)
        room_after = free_room(records)
        answers = random.Random(args.seed).sample(honest.finished, min(args.check, len(honest.finished)))
        complaints = servers.complaints()
        wrong = wrong_answers(load_local(path) if args.quant == "none" else model, answers)
    memory_mb = memory.first_and_last(args.warm_up)
    room = room_before, room_after
    numbers = tokens_per_s, memory_mb, room, len(answers), wrong, complaints, warnings.messages
    return Outcome(honest, vanishing, *numbers), memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench-tiny", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--quant", default="none", choices=QUANT_NAMES, help="none is compared with the local model")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=64, help="at a time")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=20.0, help="seconds after which memory must be flat")
    parser.add_argument("--check", type=int, default=60, help="sessions whose tokens are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-options", default="", help="more of them for the servers, in one string")
    parser.add_argument("--quick", action="store_true", help="16 sessions for 20 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    outcome, memory = run(args)
    facts = outcome.facts()
    for fact in facts:
        print(f"{'ok  ' if fact.holds else 'FAIL'} {fact.what}: {fact.found}")
    print(f"{outcome.tokens_per_s:.0f} tokens/s in {args.seconds:g} s")
    if args.json:
        write_json(
            args.json,
            vars(args),
            rows=[json_row(fact.what, float(fact.holds), 1.0, found=fact.found) for fact in facts]
            + [json_row("tokens/s", outcome.tokens_per_s)],
            memory=memory.samples,
        )
    sys.exit(not all(fact.holds for fact in facts))


if __name__ == "__main__":
    main()
