"""The client of ``network.py``, on a host of the lab: reads tasks as lines of JSON, answers each with one.

A task has the model's ``path``, the ``swarm``, the ``codec``, how many ``rows``, ``prompt`` and new ``tokens``, and the
``draft``: none, or the share of its guesses that are right.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from knowing_draft import KnowingDraft, written
from transformers.utils import logging

from swarm_client import DistributedModel
from swarm_client.core import background
from swarm_client.speculation.speculation import Speculation
from swarm_client.swarm.swarm import Swarm

_RATES_TIMEOUT_S = 45.0


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    codec, model = None, None
    for line in sys.stdin:
        task = json.loads(line)
        if model is None or task["codec"] != codec:
            if model is not None:
                model.close()
            codec = task["codec"]
            model = DistributedModel.from_pretrained(task["path"], swarm=task["swarm"], compression=codec)
            wait_for_rates(model.blocks.swarm)
        measure = answer if task["draft"] is None else answer_with_draft
        print(json.dumps(measure(model, task)), flush=True)


def wait_for_rates(swarm: Swarm) -> None:
    """Until all servers say how fast their links are, or for a while: they measure it soon after their start."""
    deadline = time.monotonic() + _RATES_TIMEOUT_S
    while time.monotonic() < deadline:
        servers = background.run(swarm.view(0.0)).servers
        if servers and all(server.network_tokens_per_s for server in servers):
            return
        time.sleep(1.0)


@torch.no_grad()
def answer(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    ids = prompts(model, task)
    cache = model.new_cache(task["prompt"] + task["tokens"] + 1)
    start = time.perf_counter()
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    prompt_s = time.perf_counter() - start
    times, sent = [], line_bytes()
    for _ in range(task["tokens"]):
        start = time.perf_counter()
        logits = model(logits[:, -1:].argmax(-1), past_key_values=cache).logits
        times.append(time.perf_counter() - start)
    links = model.blocks.swarm.links
    codecs = links.codecs_of(cache.session.hops)
    cache.session.close()
    num_tokens = task["rows"] * task["tokens"]
    times.sort()
    return {
        "step_s": times[len(times) // 2],
        "prompt_s": prompt_s,
        "bytes_per_token": (line_bytes() - sent) / num_tokens,
        "codecs": [int(codec) for codec in codecs],
        "errors": links.errors,
    }


def answer_with_draft(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Text of one row, which must be that without a draft; ``step_s`` are seconds per token."""
    ids, tokens = prompts(model, task), task["tokens"]
    plain, _ = written(model, Speculation(None), ids, tokens)
    sent = line_bytes()
    text, seconds = written(model, Speculation(KnowingDraft([plain], task["draft"])), ids, tokens)
    if text != plain:
        raise SystemExit("the text with a draft is another")
    links = model.blocks.swarm.links
    return {
        "step_s": seconds / (tokens - 1),
        "prompt_s": None,
        "bytes_per_token": (line_bytes() - sent) / tokens,
        "codecs": [],
        "errors": links.errors,
    }


def prompts(model: Any, task: dict[str, Any]) -> torch.Tensor:
    """[rows, prompt] of random tokens."""
    generator = torch.Generator().manual_seed(task["rows"])
    return torch.randint(3, model.config.vocab_size, (task["rows"], task["prompt"]), generator=generator)


def line_bytes() -> int:
    """That have passed this host's line, in both directions."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]) + int(fields[8])
    return 0


if __name__ == "__main__":
    main()
