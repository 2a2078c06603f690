"""A group of two machines beside a chain of the same two, by the round-trip time between them.

    python benchmarks/group_links.py [--rtts-ms 0.1 0.3 1 | --loopback] [--sessions 1 8] [--quant int8] [--json FILE]

The two machines and the client are network namespaces with emulated links; each machine has a core of its own. Both the
chain and the group run all the time, and take turns (A B A B) for each round-trip time. Needs root, iproute2,
/dev/net/tun and a C compiler. The emulator of links and the client take time of the same cores. On a machine with two
cores all numbers are therefore too low, and the group's more so, because it exchanges 4 messages per block. With
``--loopback`` all three share this machine's loopback interface instead, without an emulator.

``network`` is a round trip that was measured beside each row, through the emulator. ``computed`` is the formula of
``swarm_server.group.payoff`` with that time. The target of one session is four fifths of it, where a group pays at all.
Several sessions have no target: a chain computes batches of them at the same time, which the formula does not know.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch
from common import (
    Fleet,
    decode_tokens_per_s,
    even_spans,
    has_lab,
    json_row,
    median_ratio,
    random_ids,
    table_of,
    take_turns,
    write_json,
)
from local_servers import local_servers
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from network_lab import Link, NetworkLab
from rich.console import Console
from transformers import PreTrainedModel

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_server.group.payoff import QUANTS, Payoff, reading_bytes_per_s
from swarm_server.machine.memory import hosted_bytes

MACHINES = "first", "second"
CLIENT = "client"
T = TypeVar("T")
PORT = 31400
CACHE_TOKENS, PROMPT = 4096, 16
QUICK = {"model": "bench-mid", "rounds": 1, "new_tokens": 8, "rtts_ms": [0.3], "sessions": [1]}
_PINGS = 200
_OF_COMPUTED = 0.8  # the part of the computed gain that is to be measured; the rest is the emulator's and the client's


def main() -> int:
    args = parse()
    if not args.loopback and not has_lab(args.json, vars(args)):
        return 0
    torch.set_num_threads(1)  # idle threads spin on a core that the group needs
    path = make_model(args.model, args.models)
    if args.loopback:
        rows = list(measured(args, path, Loopback()))
    else:
        with NetworkLab(dict.fromkeys((*MACHINES, CLIENT), Link())) as lab:
            rows = lab.run(CLIENT, lambda: list(measured(args, path, lab)))
    Console().print(table_of(rows))
    if args.json:
        write_json(args.json, vars(args), rows=rows)
    return 0


class Loopback:
    """A stand-in for a ``NetworkLab`` whose hosts are all this machine, with links of no delay."""

    addresses = dict.fromkeys((*MACHINES, CLIENT), "127.0.0.1")

    def on(self, _host: str) -> list[str]:
        return []

    def run(self, _host: str, function: Callable[[], T]) -> T:
        return function()

    def set_link(self, _host: str, _link: Link) -> None:
        pass


Hosts = NetworkLab | Loopback


def measured(args: argparse.Namespace, path: Path, lab: Hosts) -> Iterator[dict[str, Any]]:
    """Runs on the client's host, where the links of the two machines change under their feet."""
    with contextlib.ExitStack() as stack:
        models = {
            "chain": stack.enter_context(client(stack.enter_context(chain(args, path, lab)))),
            "group": stack.enter_context(client(stack.enter_context(group(args, path, lab)))),
        }
        for model in models.values():
            decode(model, 1, 4)  # warm-up
        bytes_per_s = reading_bytes_per_s(QUANTS.index(args.quant))
        for rtt_ms, sessions in itertools.product(args.rtts_ms, args.sessions):
            for machine in MACHINES:
                lab.set_link(machine, Link(delay_ms=rtt_ms / 4))  # a path passes two links
            link = "loopback" if args.loopback else f"RTT {rtt_ms:g} ms"
            network_s = round_trip_s(lab)
            contestants = {name: partial(decode, model, sessions, args.new_tokens) for name, model in models.items()}
            values = take_turns(2 * args.rounds + 1, contestants)
            rates, room = (bytes_per_s,) * len(MACHINES), (inf,) * len(MACHINES)
            payoff = Payoff(block_bytes(path, args.quant), (network_s,), (network_s,), rates, room)
            row = json_row(
                f"{link}, {sessions} session{'s'[: sessions > 1]}, {args.quant}",
                statistics.median(values["group"]),
                _OF_COMPUTED * payoff.gain if sessions == 1 and payoff.gain > 1 else None,
                beside=statistics.median(values["chain"]),
                ratio=median_ratio(values["group"], values["chain"]),
                best_ratio=max(values["group"]) / max(values["chain"]),
                network_ms=network_s * 1e3,
                computed=payoff.gain,
                rounds=values,
            )
            print(
                f"{row['name']}: group {row['measured']:.3g}, chain {row['beside']:.3g} tokens/s "
                f"({row['ratio']:.2f} ×, best of each {row['best_ratio']:.2f} ×); network {row['network_ms']:.2f} ms, "
                f"computed for one session with {bytes_per_s / 1e9:.1f} GB/s {row['computed']:.2f} ×",
                flush=True,
            )
            yield row


def decode(model: PreTrainedModel, sessions: int, new_tokens: int) -> float:
    return decode_tokens_per_s(model, [random_ids(PROMPT) for _ in range(sessions)], new_tokens)


def block_bytes(path: Path, quant: str) -> float:
    return statistics.mean(hosted_bytes(ModelCheckpoint.open(path), quant))


@contextlib.contextmanager
def client(fleet: Fleet) -> Iterator[PreTrainedModel]:
    with fleet.client("int8") as model:
        yield model


@contextlib.contextmanager
def chain(args: argparse.Namespace, path: Path, lab: Hosts) -> Iterator[Fleet]:
    spans = even_spans(SHAPES[path.name]["num_hidden_layers"], len(MACHINES))
    with servers(args, path, lab, spans, []) as fleet:
        yield fleet


@contextlib.contextmanager
def group(args: argparse.Namespace, path: Path, lab: Hosts) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as directory:
        key, address = f"{directory}/group.key", f"{lab.addresses[MACHINES[0]]}:{PORT}"
        common = ["--group-key", key]
        leading = ["--group-size", "2", "--group-listen", address, "--group-always", *common]
        whole = f"0:{SHAPES[path.name]['num_hidden_layers']}"
        following = follower(args, path, lab, ["--follow", address, *common], Path(key))
        with following, servers(args, path, lab, [whole], leading) as fleet:
            yield fleet


@contextlib.contextmanager
def servers(args: argparse.Namespace, path: Path, lab: Hosts, spans: list[str], more: list[str]) -> Iterator[Fleet]:
    """One server per span, on the machines and cores in their order."""
    swarm = f"group-links-{os.getpid()}-{len(spans)}"
    hosts = [(lab.on(machine), lab.addresses[machine]) for machine in MACHINES]
    options = ["--model", str(path), "--quant", args.quant, "--cache-tokens", str(CACHE_TOKENS), "--device", "cpu"]
    options += ["--log-level", "info", *more]
    with local_servers(swarm, spans, options, cores()[: len(spans)], hosts) as running:
        yield Fleet(path, swarm, running)


@contextlib.contextmanager
def follower(args: argparse.Namespace, path: Path, lab: Hosts, flags: list[str], key: Path) -> Iterator[None]:
    """The second machine's process; it starts as soon as the leader has made the key."""
    pinned = ["taskset", "--cpu-list", str(cores()[1]), sys.executable, "-m", "swarm_server", *flags]
    command = [*lab.on(MACHINES[1]), *pinned, "--model", str(path), "--quant", args.quant, "--log-level", "warning"]
    processes: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()

    def start() -> None:
        while not stopped.is_set() and not (key.exists() and key.stat().st_size):
            time.sleep(0.1)
        if not stopped.is_set():
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))

    starting = threading.Thread(target=start)
    starting.start()
    try:
        yield
    finally:
        stopped.set()
        starting.join()
        for process in processes:
            process.terminate()
            process.wait()


def cores() -> list[int]:
    """Return a core for each machine."""
    found = sorted(os.sched_getaffinity(0))
    return [found[number % len(found)] for number in range(len(MACHINES))]


def round_trip_s(lab: Hosts) -> float:
    """Return the median time of one byte between the two machines, there and back, over TCP."""
    server = lab.run(MACHINES[1], lambda: socket.create_server((lab.addresses[MACHINES[1]], 0)))
    with server, lab.run(MACHINES[0], lambda: socket.create_connection(server.getsockname())) as near:
        far, _ = server.accept()
        with far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            echoing = threading.Thread(target=_echo, args=(far,))
            echoing.start()
            times_s = []
            for _ in range(_PINGS):
                start = time.perf_counter()
                near.sendall(b".")
                near.recv(1)
                times_s.append(time.perf_counter() - start)
            near.shutdown(socket.SHUT_WR)
            echoing.join()
    return statistics.median(times_s)


def _echo(connection: socket.socket) -> None:
    while data := connection.recv(1):
        connection.sendall(data)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtts-ms", nargs="+", type=float, default=[0.1, 0.3, 1.0], metavar="MS")
    parser.add_argument("--loopback", action="store_true", help="without emulated links; --rtts-ms has no effect")
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 8], metavar="N")
    parser.add_argument("--quant", default="int8", choices=QUANTS)
    parser.add_argument("--model", default="bench-1b", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="bench-mid, one round: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    if args.loopback:
        args.rtts_ms = [0.0]
    return args


if __name__ == "__main__":
    raise SystemExit(main())
