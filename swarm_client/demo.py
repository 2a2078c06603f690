"""Three servers share the shipped model on this machine, and a client writes text through them."""

from __future__ import annotations

import os
import time

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from swarm_client import background
from swarm_client.config import ClientConfig
from swarm_client.generation import TextOptions, load_tokenizer, stream_text
from swarm_client.local_servers import local_servers
from swarm_client.model import DistributedModel
from swarm_client.status import read_status, show
from swarm_protocol.default_model import DEFAULT_MODEL, locate
from swarm_protocol.shell import stock_loader

DEFAULT_PROMPT = "Return a list of"
SPANS = ("0:9", "9:14", "14:20")


def run_demo(prompt: str, max_new_tokens: int) -> None:
    """Raises SwarmError if a server does not start."""
    console = Console(highlight=False)
    swarm = f"demo-{os.getpid()}"
    console.print(f"Starting three servers for blocks {', '.join(SPANS)} of {DEFAULT_MODEL} …")
    start = time.perf_counter()
    with local_servers(swarm, SPANS):
        console.print(f"… ready after {time.perf_counter() - start:.1f} s\n")
        config = ClientConfig(swarm=swarm)
        show(console, swarm, background.run(read_status(config)))
        console.print("\n[bold]Through the swarm[/] (blocks in int8 on three servers):")
        tokenizer = load_tokenizer()
        options = TextOptions(max_new_tokens=max_new_tokens, temperature=0)
        with DistributedModel.from_pretrained(swarm=swarm) as model:
            remote = stream_text(model, tokenizer, prompt, options)
        console.print(f"\n{len(remote.token_ids)} tokens, {remote.tokens_per_s:.1f} tokens/s")
    console.print("\n[bold]The same model on its own[/] (float32, in this process):")
    with stock_loader():
        local_model = AutoModelForCausalLM.from_pretrained(locate(DEFAULT_MODEL), dtype=torch.float32).eval()
    local = stream_text(local_model, tokenizer, prompt, options)
    console.print(f"\n{verdict(remote.token_ids, local.token_ids)}")


def verdict(remote: list[int], local: list[int]) -> str:
    """One sentence that compares two continuations."""
    if remote == local:
        return f"All {len(local)} tokens are the same."
    pairs = list(zip(remote, local, strict=False))
    same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    return f"The first {same} of {len(local)} tokens are the same; then int8 rounding chose another."
