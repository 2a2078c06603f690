"""Four servers share the shipped model on this machine, and a client writes text through them while one is killed."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack

import torch
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM

from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.core.events import Event
from swarm_client.demo.local_cluster import LocalCluster
from swarm_client.generation.generation import load_tokenizer, stream_text
from swarm_client.generation.text_options import TextOptions
from swarm_client.model.model import DistributedModel
from swarm_client.monitor.status import read_status, show
from swarm_protocol.checkpoints.default_model import DEFAULT_MODEL, locate
from swarm_protocol.checkpoints.hollow_model import hf_loader
from swarm_protocol.process.local_registry import LocalRegistry
from swarm_protocol.process.scratch import remove_dead

DEFAULT_PROMPT = "Return a list of"
SPANS = ("0:9", "9:14", "9:14", "14:20")
KILL_AFTER = 20  # tokens; half of them if there are fewer


def run_demo(prompt: str, options: TextOptions) -> None:
    """Raises SwarmError if a server does not start."""
    console = Console(highlight=False)
    logging.getLogger("swarm_client.core.events").setLevel(logging.ERROR)  # printed below, and not amid the text
    swarm = f"demo-{os.getpid()}"
    console.print(f"Starting four servers for blocks {', '.join(SPANS)} of {DEFAULT_MODEL} …")
    start = time.perf_counter()
    with ExitStack() as cleanup:
        cleanup.callback(LocalRegistry(swarm).remove_if_ended)  # the server that is killed cannot do so itself,
        cleanup.callback(remove_dead)  # nor this
        cluster = cleanup.enter_context(LocalCluster())
        servers = [cluster.start("--blocks", span, "--swarm", swarm) for span in SPANS]
        cluster.wait_ready(servers)
        console.print(f"… ready after {time.perf_counter() - start:.1f} s\n")
        show(console, swarm, background.run(read_status(ClientConfig(swarm=swarm))))
        console.print("\n[bold]Through the swarm[/] (int8, three servers; one of them will be killed):")
        tokenizer = load_tokenizer()
        events: list[Event] = []
        with DistributedModel.from_pretrained(swarm=swarm) as model:
            cache = model.new_cache(on_event=events.append)

            def kill_one(num_tokens: int) -> None:
                if num_tokens == min(KILL_AFTER, options.max_new_tokens // 2):
                    victim = cache.session.hops[1].server
                    next(server for server in servers if server.peer_id == victim.peer_id).kill()
                    console.print(Text(f"[server {victim.short_id} was killed here] ", "bold red"), end="")

            remote = stream_text(model, tokenizer, prompt, options, cache=cache, on_token=kill_one)
        console.print(f"\n{len(remote.token_ids)} tokens, {remote.tokens_per_s:.1f} tokens/s")
        for event in events:
            console.print(Text(f"{event}", "red"))
    console.print("\n[bold]The same model on its own[/] (float32, in this process):")
    with hf_loader():
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
