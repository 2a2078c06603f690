"""How much faster text comes with a draft: over slow links, on this machine, and among others.

    python benchmarks/speculation.py                  # 3 servers × 50 ms with the shipped model; bench-1b on loopback
    python benchmarks/speculation.py --quick          # in a minute, to see that it works
    python benchmarks/speculation.py --only far --json speculation.json

Contestants take turns (A B A B). Texts are compared with those of plain generation token by token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import even_spans, fleet, json_row, random_ids, take_turns, write_json
from far_servers import far_servers
from knowing_draft import KnowingDraft, written
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from transformers import AutoTokenizer, PreTrainedModel

from swarm_client import DistributedModel
from swarm_client.drafts.opening import open_speculation
from swarm_client.speculation.speculation import Speculation
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import DEFAULT_MODEL, locate

PROMPT = 64
FAR_TARGETS = {"auto": 2.2, "knowing-0.8": 3.8}
NEAR_TARGETS = {"knowing-0.7": 1.3}
CHOICES = ("far", "near", "users")


def rows(
    model: PreTrainedModel,
    name: str,
    prompts: Sequence[torch.Tensor],
    ways: dict[str, Speculation],
    targets: dict[str, float],
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """One per way: tokens per second after the first token, beside plain."""
    plain = [written(model, Speculation(None), prompt, args.new_tokens)[0] for prompt in prompts]
    ways |= {
        f"knowing-{chance}": Speculation(KnowingDraft(plain, chance)) for chance in (0.7, 0.8) if chance in args.chances
    }
    equal = dict.fromkeys(ways, 0)

    def measure(way: str, speculation: Speculation) -> float:
        seconds = 0.0
        for prompt, expected in zip(prompts, plain, strict=True):
            text, decode_s = written(model, speculation, prompt, args.new_tokens)
            seconds += decode_s
            if way in equal:
                equal[way] += text == expected
        return len(prompts) * (args.new_tokens - 1) / seconds

    contestants = {"plain": lambda: measure("plain", Speculation(None))}
    contestants |= {way: lambda way=way, own=own: measure(way, own) for way, own in ways.items()}
    measured = take_turns(args.rounds, contestants)
    beside = statistics.median(measured["plain"])
    for way, speculation in ways.items():
        ratio = statistics.median(
            rate / reference for rate, reference in zip(measured[way], measured["plain"], strict=True)
        )
        stats = speculation.stats
        yield json_row(
            f"{name}-{way}",
            statistics.median(measured[way]),
            targets.get(way),
            beside=beside,
            ratio=ratio,
            equal_texts=f"{equal[way]} of {args.rounds * len(prompts)}",
            tokens_per_pass=stats.tokens / max(1, stats.passes),
            guesses_per_pass=stats.guesses / max(1, stats.passes),
        )


def far(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The shipped model over servers that are 50 ms away from one another and from the client."""
    checkpoint = ModelCheckpoint.open(locate(DEFAULT_MODEL))
    swarm = f"benchmark-{os.getpid()}-far"
    spans = even_spans(checkpoint.family.num_blocks, args.servers)
    prompts = held_out(args.prompts)
    with (
        far_servers(swarm, spans, ["--model", DEFAULT_MODEL, "--log-level", "warning"], args.delay_ms / 1000),
        DistributedModel.from_pretrained(DEFAULT_MODEL, swarm=swarm, check_share=0.0) as model,
    ):
        ways = {name: open_speculation(name, model, checkpoint) for name in ("auto", "lookup")}
        yield from rows(model, "far", prompts, ways, FAR_TARGETS, args)


def held_out(count: int) -> list[torch.Tensor]:
    """Beginnings of windows of the text that the shipped model has not been trained on."""
    directory = Path(locate(DEFAULT_MODEL))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer((directory / "heldout.txt").read_text(), verbose=False)["input_ids"]
    starts = torch.randint(1, len(ids) - PROMPT, (count,), generator=torch.Generator().manual_seed(7)).tolist()
    return [torch.tensor([[tokenizer.bos_token_id, *ids[start : start + PROMPT - 1]]]) for start in starts]


def near(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A model of a thousand million weights on this machine."""
    path = args.models / args.model
    make_model(args.model, path)
    with fleet(path, 2, "int8") as servers, servers.client("int8") as model:
        prompts = [random_ids(PROMPT) for _ in range(args.prompts)]
        yield from rows(model, "near", prompts, {}, NEAR_TARGETS, args)


def users(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Eight connections share the servers: with drafts, none may be slower."""
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import ExitStack

    path = args.models / args.model
    make_model(args.model, path)
    with fleet(path, 2, "int8") as servers, ExitStack() as stack:
        clients = [stack.enter_context(servers.client("int8")) for _ in range(8)]
        prompts = [random_ids(PROMPT) for _ in clients]
        plain = [written(clients[0], Speculation(None), prompt, args.new_tokens)[0] for prompt in prompts]

        def together(chance: float | None) -> float:
            ways = [Speculation(None if chance is None else KnowingDraft(plain, chance)) for _ in clients]
            with ThreadPoolExecutor(8) as pool:
                start = time.perf_counter()
                list(pool.map(written, clients, ways, prompts, [args.new_tokens] * 8))
                return 8 * args.new_tokens / (time.perf_counter() - start)

        measured = take_turns(args.rounds, {"plain": lambda: together(None), "with": lambda: together(0.7)})
        ratio = statistics.median(a / b for a, b in zip(measured["with"], measured["plain"], strict=True))
        rate, beside = statistics.median(measured["with"]), statistics.median(measured["plain"])
        yield json_row("users-8-knowing-0.7", rate, 0.95, beside=beside, ratio=ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--model", default="bench-1b", choices=SHAPES, help="of near and users")
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=50.0, help="of each link, one way")
    parser.add_argument("--chances", type=float, nargs="+", default=[0.7, 0.8], help="of drafts that know the text")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="one round of short texts: shows that everything works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(model="bench-tiny", prompts=1, rounds=1, new_tokens=16, delay_ms=5.0)
    found = []
    for name in args.only:
        for row in {"far": far, "near": near, "users": users}[name](args):
            found.append(row)
            print(
                f"{row['name']:24} {row['measured']:6.2f} tokens/s, plain {row['beside']:6.2f}: {row['ratio']:.2f} ×"
                f"  {'' if row['met'] is None else 'target ' + str(row['target']) + ': ' + row['met']}"
                f"  {row.get('equal_texts', '')}  {row.get('tokens_per_pass', 0):.2f} tokens/pass",
                flush=True,
            )
    if args.json:
        write_json(args.json, vars(args), rows=found)


if __name__ == "__main__":
    main()
