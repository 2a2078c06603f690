"""Speed of one user's generation through servers on this machine, beside local Hugging Face in the same run.

    python benchmarks/decode.py                                   # bench-1b, 2 servers, one core each, fp32 and int8
    python benchmarks/decode.py --model bench-tiny --quant none   # seconds instead of minutes
    python benchmarks/decode.py --json decode.json

Local and swarm take turns (A B A B), because such machines are noisy: compare by the ratio, not across runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from make_model import DEFAULT_OUTPUT, SHAPES, make_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from swarm_client import DistributedModel
from swarm_client.local_servers import LocalServer, local_servers

QUANTS = ("none", "int8")


def measure(model: PreTrainedModel, prompt_tokens: int, new_tokens: int, prefill_tokens: int) -> dict[str, float]:
    """Greedy decoding and prefill, tokens per second; first token in seconds, after a warm-up of one token."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, 1000, (1, prompt_tokens), generator=generator)
    long_prompt = torch.randint(3, 1000, (1, prefill_tokens), generator=generator)

    def generate(input_ids: torch.Tensor, count: int) -> float:
        start = time.perf_counter()
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    generate(prompt, 1)
    first_s = generate(prompt, 1)
    all_s = generate(prompt, new_tokens + 1)
    prefill_s = generate(long_prompt, 1)
    return {
        "decode_tokens_per_s": new_tokens / (all_s - first_s),
        "first_token_s": first_s,
        "prefill_tokens_per_s": prefill_tokens / prefill_s,
    }


def even_spans(num_blocks: int, num_servers: int) -> list[str]:
    cuts = [round(i * num_blocks / num_servers) for i in range(num_servers + 1)]
    return [f"{start}:{end}" for start, end in itertools.pairwise(cuts)]


def run(args: argparse.Namespace) -> dict:
    path = make_model(args.model, args.models)
    cores = sorted(os.sched_getaffinity(0))
    pins = [cores[i % len(cores)] for i in range(args.servers)]
    spans = even_spans(SHAPES[args.model]["num_hidden_layers"], args.servers)
    torch.set_num_threads(1)
    local = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rounds: dict[str, list[dict]] = {"local fp32": []}
    servers: dict[str, dict] = {}
    numbers = (args.prompt_tokens, args.new_tokens, args.prefill_tokens)
    for quant in args.quant:
        name = f"swarm {'fp32' if quant == 'none' else quant}"
        swarm = f"decode-{os.getpid()}-{quant}"
        arguments = ["--model", str(path), "--quant", quant, "--cache-tokens", "8192", "--log-level", "warning"]
        with (
            local_servers(swarm, spans, arguments, pins) as running,
            DistributedModel.from_pretrained(str(path), swarm=swarm) as remote,
        ):
            for _ in range(args.rounds):
                rounds["local fp32"].append(measure(local, *numbers))
                rounds.setdefault(name, []).append(measure(remote, *numbers))
            servers[name] = describe_servers(running)
    return {"rounds": rounds, "servers": servers}


def describe_servers(running: list[LocalServer]) -> dict[str, float]:
    return {
        "start_to_ready_s": max(server.start_s for server in running),
        "peak_memory_gib": max(server.peak_memory_bytes for server in running) / 2**30,
    }


def summarise(result: dict) -> list[dict]:
    """One row per contestant: medians over the rounds, ratios to the local rounds that alternated with them."""
    rows = []
    local = result["rounds"]["local fp32"]
    offset = 0
    for name, rounds in result["rounds"].items():
        row = {"name": name, **{key: statistics.median(entry[key] for entry in rounds) for key in rounds[0]}}
        if name != "local fp32":
            beside = local[offset : offset + len(rounds)]
            offset += len(rounds)
            for key in ("decode_tokens_per_s", "prefill_tokens_per_s"):
                row[f"{key}_ratio"] = statistics.median(
                    entry[key] / other[key] for entry, other in zip(rounds, beside, strict=True)
                )
            row |= result["servers"][name]
        rows.append(row)
    return rows


def print_table(rows: list[dict]) -> None:
    print(f"{'':12} {'decode':>8} {'×local':>7} {'prefill':>8} {'×local':>7} {'first':>7} {'start':>7} {'memory':>8}")
    print(f"{'':12} {'tokens/s':>8} {'':>7} {'tokens/s':>8} {'':>7} {'s':>7} {'s':>7} {'GiB':>8}")
    for row in rows:
        cells = [
            (row["decode_tokens_per_s"], 8),
            (row.get("decode_tokens_per_s_ratio"), 7),
            (row["prefill_tokens_per_s"], 8),
            (row.get("prefill_tokens_per_s_ratio"), 7),
            (row["first_token_s"], 7),
            (row.get("start_to_ready_s"), 7),
            (row.get("peak_memory_gib"), 8),
        ]
        print(f"{row['name']:12} " + " ".join(f"{'' if x is None else format(x, '.2f'):>{w}}" for x, w in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bench-1b", choices=SHAPES)
    parser.add_argument("--models", type=Path, default=DEFAULT_OUTPUT, help="directory of the checkpoints")
    parser.add_argument("--quant", nargs="+", default=list(QUANTS), choices=QUANTS)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    result = run(args)
    rows = summarise(result)
    print_table(rows)
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"settings": settings, **machine, "rows": rows, **result}, indent=2))


if __name__ == "__main__":
    main()
