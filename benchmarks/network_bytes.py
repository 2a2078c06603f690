"""Sections ``bytes`` and ``loss`` of ``network.py``: what codecs cost and save, by link.

Petals' published steps per second (BLOOM-176B, 3 × A100) are those of steps of one row that take 0.585 s on the best
link. Delay costs a short step a larger share of its time; so beside one row stand steps of so many rows that they take
about as long as Petals', which carry as many times more bytes. Both are judged, and so is one row with a draft, which
is how delay is hidden from it: beside one row on the best link, without a draft.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import even_spans, json_row
from local_servers import local_servers
from network_lab import Link, NetworkLab, half
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from swarm_client import DistributedModel
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.codecs.sizes import CODEC_NAMES, LADDER

_PETALS = {"1 Gbit, 5 ms": 1.71, "100 Mbit, 5 ms": 1.66, "100 Mbit, 100 ms": 1.23}  # steps/s
_STEP_S = 1 / _PETALS["1 Gbit, 5 ms"]
_NUM_SERVERS = 2
_MTU = 9000  # packets of a LAN: at 1500 bytes, to emulate 1 Gbit/s takes a core
_DRAFT = 0.8  # of whose guesses are right
_WITH_DRAFT = f"one row, a draft of {_DRAFT}"
_WINDOW, _LOSS_WINDOWS = 256, 32
_numbers = itertools.count()
Answer = dict[str, Any]


def measure(args: argparse.Namespace, links: dict[str, Link], console: Console) -> list[dict[str, Any]]:
    found: dict[tuple[str, str, str], Answer] = {}
    num_rows = 4 if args.quick else args.rows
    codecs = ["raw", "auto"] if args.quick else args.codecs
    for name, link in links.items():
        with swarm_behind(args, link) as ask:
            num_rows = num_rows or rows_of_long_step(ask)
            for codec in codecs:
                found[name, codec, "one row"] = ask(codec, 1, 16 if args.quick else 128, 4 if args.quick else 48)
                found[name, codec, f"{num_rows} rows"] = ask(codec, num_rows, 4, 2 if args.quick else 8)
            if "auto" in codecs:
                found[name, "auto", _WITH_DRAFT] = ask("auto", 1, 16, 16 if args.quick else 96, _DRAFT)
        console.print(shown(name, found))
    return as_rows(found)


# ------------------------------------------------------------ speed


@contextlib.contextmanager
def swarm_behind(args: argparse.Namespace, link: Link) -> Iterator[Any]:
    """Servers and a client, each behind such a link: a function that has the client measure something."""
    path = locate(DEFAULT_MODEL) if args.quick else args.model
    num_blocks = json.loads((Path(path) / "config.json").read_text())["num_hidden_layers"]
    hosts = ["client", *(f"server{number}" for number in range(_NUM_SERVERS))]
    swarm = f"network-{os.getpid()}-{next(_numbers)}"
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(NetworkLab({host: half(link) for host in hosts}, _MTU, args.sysctl))
        cores = sorted(os.sched_getaffinity(0))
        places = [(lab.on(host), lab.addresses[host]) for host in hosts[1:]]
        options = ["--model", str(path), "--quant", "int8", "--log-level", "warning", "--prefix-cache", "none"]
        pins = [cores[number % len(cores)] for number in range(_NUM_SERVERS)]
        stack.enter_context(local_servers(swarm, even_spans(num_blocks, _NUM_SERVERS), options, pins, places))
        command = [*lab.on("client"), sys.executable, str(Path(__file__).with_name("network_client.py"))]
        client = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(client.kill)

        def ask(codec: str, rows: int, prompt: int, tokens: int, draft: float | None = None) -> Answer:
            task = {"path": str(path), "swarm": swarm, "codec": codec, "rows": rows, "prompt": prompt, "tokens": tokens}
            task["draft"] = draft
            client.stdin.write(json.dumps(task) + "\n")
            client.stdin.flush()
            line = client.stdout.readline()
            if not line:
                raise SystemExit("the client in the lab has failed")
            return json.loads(line) | {"rows": rows, "prompt": prompt}

        yield ask


def rows_of_long_step(ask: Any) -> int:
    """As many as take as long as a step of Petals."""
    step_s = ask("raw", 32, 8, 4)["step_s"]
    return max(8, 8 * round(32 * _STEP_S / step_s / 8))


def shown(link: str, found: dict[tuple[str, str, str], Answer]) -> Table:
    table = Table("codec", "", "steps/s", "tokens/s", "prompt, tokens/s", "bytes/token", "links", title=link)
    for (name, codec, rows), answer in found.items():
        if name == link:
            used = ", ".join(CODEC_NAMES[number] for number in answer["codecs"])
            numbers = 1 / answer["step_s"], answer["rows"] / answer["step_s"]
            prompt = "" if answer["prompt_s"] is None else f"{prompt_tokens_per_s(answer):.3g}"
            num_bytes = f"{answer['bytes_per_token']:.0f}"
            table.add_row(codec, rows, *(f"{n:.3g}" for n in numbers), prompt, num_bytes, used)
    return table


def prompt_tokens_per_s(answer: Answer) -> float | None:
    """None: the prompt was not measured."""
    return None if answer["prompt_s"] is None else answer["rows"] * answer["prompt"] / answer["prompt_s"]


def as_rows(found: dict[tuple[str, str, str], Answer]) -> list[dict[str, Any]]:
    """Tokens/s, beside those on the first link; with ``auto`` steps should be slowed down less than Petals' are."""
    rows = []
    first = next((link for link, *_ in found), "")
    best = _PETALS["1 Gbit, 5 ms"]
    for (link, codec, kind), answer in found.items():
        beside = found[first, codec, "one row" if kind == _WITH_DRAFT else kind]
        ratio = beside["step_s"] / answer["step_s"]
        is_judged = codec == "auto" and link in _PETALS and first == "1 Gbit, 5 ms"
        target = _PETALS[link] / best if is_judged and link != first else None
        rows.append(
            json_row(
                f"{link}, {codec}, {kind}: tokens/s",
                answer["rows"] / answer["step_s"],
                target,
                beside=beside["rows"] / beside["step_s"],
                ratio=ratio,
                bytes_per_token=answer["bytes_per_token"],
                prompt_tokens_per_s=prompt_tokens_per_s(answer),
                codecs=[CODEC_NAMES[number] for number in answer["codecs"]],
                errors=answer["errors"],
            )
        )
    return rows


# ------------------------------------------------------------ loss


def losses(args: argparse.Namespace, _links: dict[str, Link], console: Console) -> list[dict[str, Any]]:
    """Cross-entropy of the shipped model on its held-out text, through two servers, by codec."""
    path = Path(locate(DEFAULT_MODEL))
    ids = AutoTokenizer.from_pretrained(path)((path / "heldout.txt").read_text(), verbose=False)["input_ids"]
    num_windows = 2 if args.quick else _LOSS_WINDOWS
    windows = torch.tensor(ids[: num_windows * _WINDOW]).view(num_windows, _WINDOW)
    swarm = f"network-loss-{os.getpid()}"
    found: dict[str, float] = {}
    with local_servers(swarm, even_spans(20, _NUM_SERVERS), ["--quant", "none", "--log-level", "warning"]):
        for name in LADDER:
            with DistributedModel.from_pretrained(swarm=swarm, compression=name) as model, torch.no_grad():
                parts = [model(part, labels=part, use_cache=False).loss.item() for part in windows.split(8)]
                found[name] = sum(parts) / len(parts)
    console.print(
        "cross-entropy of the shipped model: ", ", ".join(f"{name} {loss:.4f}" for name, loss in found.items())
    )
    return [
        json_row(f"loss of the shipped model, {name}", loss, beside=found["raw"], ratio=loss / found["raw"])
        for name, loss in found.items()
    ]
