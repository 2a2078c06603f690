"""What a generation loses while its two servers give their weights to a third machine, and how fast these come.

    python benchmarks/share_weights.py [--mbit 100] [--rtt-ms 5] [--model bench-mid] [--new-tokens 16] [--json FILE]

Two members, the client and the machine that joins are network namespaces, each behind a line of its own. The machine
that joins has no copy of the model. It runs with the lowest priority, since elsewhere its processor would not be the
members'. The generation is measured before, meanwhile and afterwards. Needs root, iproute2, /dev/net/tun and a C
compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Fleet, decode_tokens_per_s, even_spans, has_lab, json_row, random_ids, table_of, write_json
from local_servers import local_servers
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from network_lab import Link, NetworkLab, half
from rich.console import Console
from transformers import PreTrainedModel

from swarm_client.core import background

MEMBERS, JOINER, CLIENT = ("first", "second"), "joiner", "client"
PROMPT = 16
LEAST_SHARE, LEAST_RATIO = 0.9, 0.9
_MTU = 9000  # fewer packets: to emulate the line takes less of the cores that the generation needs
_POLL_S, _RECENT_LOOKS = 0.25, 5
_OFFER_S = 120.0


def main() -> int:
    args = parse()
    if not has_lab(args.json, vars(args)):
        return 0
    torch.set_num_threads(1)
    path = make_model(args.model, args.models)
    line = half(Link(delay_ms=args.rtt_ms / 2, mbit=args.mbit))
    with NetworkLab(dict.fromkeys((*MEMBERS, JOINER, CLIENT), line), _MTU) as lab:
        rows = lab.run(CLIENT, lambda: measured(args, path, lab))
    Console(width=150, highlight=False).print(table_of(rows))
    if args.json:
        write_json(args.json, vars(args), rows=rows)
    return 0


def measured(args: argparse.Namespace, path: Path, lab: NetworkLab) -> list[dict[str, Any]]:
    """Runs on the client's host."""
    with members(path, lab) as fleet, fleet.client("int8") as model:
        wait_for_offers(model)
        decode(model, args.new_tokens)  # warm-up
        alone, alone_cpu_s = paced(fleet, model, args.new_tokens, args.rounds)
        with joining(path, lab, fleet) as traffic:
            traffic.wait_until(args.mbit)
            begun_s, beside, cpu_s = time.monotonic(), [], members_cpu_s(fleet)
            while traffic.is_full(args.mbit):
                beside.append(decode(model, args.new_tokens))
            beside = beside[:-1]  # the last one may have had the line for itself
            took_s, cpu_s = time.monotonic() - begun_s, members_cpu_s(fleet) - cpu_s
            rate = traffic.bytes_per_s()
        after, _ = paced(fleet, model, args.new_tokens, args.rounds)
    if not beside:
        raise SystemExit("the weights came before a generation was measured: take a larger --model or a lower --mbit")
    usual = statistics.median([*alone, *after])
    per_token_s = alone_cpu_s / (args.rounds * args.new_tokens)
    tokens = (len(beside) + 1) * args.new_tokens
    sharing_ms = 1e3 * (cpu_s - per_token_s * tokens) / (rate * took_s / 1e6)
    share = rate * 8e-6 / args.mbit
    ratio = statistics.median(beside) / usual
    return [
        json_row("joiner: share of its line", share, LEAST_SHARE, rounds=len(beside)),
        json_row("generation meanwhile, tokens/s", statistics.median(beside), LEAST_RATIO, beside=usual, ratio=ratio),
        json_row("processor time of the members, ms per MB sent", sharing_ms),
    ]


def decode(model: PreTrainedModel, new_tokens: int) -> float:
    return decode_tokens_per_s(model, [random_ids(PROMPT)], new_tokens)


def paced(fleet: Fleet, model: PreTrainedModel, new_tokens: int, rounds: int) -> tuple[list[float], float]:
    """Return tokens/s of each round, and the members' processor time for all of them, prompts included."""
    before_s = members_cpu_s(fleet)
    values = [decode(model, new_tokens) for _ in range(rounds)]
    return values, members_cpu_s(fleet) - before_s


def members_cpu_s(fleet: Fleet) -> float:
    return sum(server.cpu_s for server in fleet.servers)


@contextlib.contextmanager
def members(path: Path, lab: NetworkLab) -> Iterator[Fleet]:
    swarm = f"share-weights-{os.getpid()}"
    cores = sorted(os.sched_getaffinity(0))
    pins = [cores[number % len(cores)] for number in range(len(MEMBERS))]
    options = ["--model", str(path), "--quant", "int8", "--share-weights", "always", "--log-level", "warning"]
    spans = even_spans(SHAPES[path.name]["num_hidden_layers"], len(MEMBERS))
    hosts = [(lab.on(host), lab.addresses[host]) for host in MEMBERS]
    with local_servers(swarm, spans, options, pins, hosts) as running:
        yield Fleet(path, swarm, running)


def wait_for_offers(model: Any) -> None:
    """Until both members offer files and know how fast their lines are: they read and measure after their start."""
    deadline_s = time.monotonic() + _OFFER_S
    while time.monotonic() < deadline_s:
        servers = background.run(model.blocks.swarm.view(0.0)).servers
        if len(servers) == len(MEMBERS) and all(each.weights and each.network_tokens_per_s for each in servers):
            return
        time.sleep(1.0)
    raise SystemExit("the members do not offer their files")


class Traffic:
    """What comes over the joiner's line, looked at in a thread until it is stopped."""

    def __init__(self, lab: NetworkLab) -> None:
        self._lab = lab
        self._looks: list[tuple[float, int]] = []  # time, bytes received so far
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def wait_until(self, mbit: float) -> None:
        """Wait until the line is in use; SystemExit if it never is."""
        deadline_s = time.monotonic() + _OFFER_S
        while not self.is_full(mbit):
            if time.monotonic() > deadline_s:
                raise SystemExit("no weights have come")
            time.sleep(_POLL_S)
        self._looks = self._looks[-2:]

    def is_full(self, mbit: float) -> bool:
        """Return whether more than a third of the line was in use at the last looks."""
        recent = self._looks[-_RECENT_LOOKS:]
        if len(recent) < 2:
            return False
        (before_s, before), (now_s, now) = recent[0], recent[-1]
        return (now - before) * 8e-6 > mbit / 3 * (now_s - before_s)

    def bytes_per_s(self) -> float:
        """Return the rate from the first look to the last one at which the line was in use."""
        steps = [later[1] - sooner[1] for sooner, later in zip(self._looks, self._looks[1:], strict=False)]
        used = [number for number, step in enumerate(steps) if step > max(steps) / 3]
        (start_s, start), (end_s, end) = self._looks[0], self._looks[used[-1] + 1]
        return (end - start) / (end_s - start_s)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            self._looks.append((time.monotonic(), self._lab.run(JOINER, received_bytes)))


def received_bytes() -> int:
    """Of this thread's host."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[0])
    return 0


@contextlib.contextmanager
def joining(path: Path, lab: NetworkLab, fleet: Fleet) -> Iterator[Traffic]:
    """The machine without a copy, which fetches all blocks; it is stopped afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        (peer,) = re.findall(r" peer=(\S+)", fleet.servers[0].ready_line)
        span = f"0:{SHAPES[path.name]['num_hidden_layers']}"
        flags = ["--swarm", fleet.swarm, "--initial-peers", peer, "--host", lab.addresses[JOINER]]
        flags += ["--model", f"swarm://{path.name}", "--blocks", span]
        flags += ["--quant", "none", "--throughput", "0.001", "--share-weights", "never", "--log-level", "warning"]
        command = [*lab.on(JOINER), "nice", "-n", "19", sys.executable, "-m", "swarm_server", *flags]
        environment = os.environ | {"XDG_CACHE_HOME": directory, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=directory)
        traffic = Traffic(lab)
        try:
            yield traffic
        finally:
            traffic.stop()
            process.terminate()
            process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each line, in both directions")
    parser.add_argument("--rtt-ms", type=float, default=5.0, help="round trip between any two hosts")
    parser.add_argument("--model", default="bench-mid", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each measured generation")
    parser.add_argument("--rounds", type=int, default=8, help="of the generation alone, before and afterwards")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
