"""Servers that say nothing any more: stopped, or behind a network that swallows every packet."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults import (
    NUM_SPANS,
    Generation,
    Replicas,
    Tally,
    console,
    generation,
    model_path,
    random_prompts,
    results_table,
    spread,
    undisturbed,
    wait_until,
)
from silence import NoNamespaces, silent_network, silent_server
from transformers import PreTrainedModel

from swarm_cli.demo.local_cluster import LocalCluster, LocalServer
from swarm_client.sessions.session import RemoteSession

PROMPT, NEW_TOKENS, AT_TOKEN = 70, 32, 10
_NOTICE_TIMEOUT_S = 60.0


class Watch:
    """Notes when a session has noticed that something is wrong."""

    def __init__(self, session: RemoteSession) -> None:
        self.start_s = time.perf_counter()
        self.noticed_s: float | None = None
        self._session = session
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        def has_noticed() -> bool:
            return self._session._lanes[0].chain._replacer._stall is not None

        if wait_until(has_noticed, _NOTICE_TIMEOUT_S) is not None:
            self.noticed_s = time.perf_counter() - self.start_s


def hang(
    model: PreTrainedModel, prompt: torch.Tensor, fault: Callable[[RemoteSession], None]
) -> tuple[Generation, dict[str, float | None]]:
    """Times from the fault, which comes amid the text, to what follows."""
    watches: list[Watch] = []

    def on_token(session: RemoteSession, num_tokens: int) -> None:
        if num_tokens == AT_TOKEN:
            fault(session)
            watches.append(Watch(session))

    with generation(model, prompt, NEW_TOKENS, on_token) as result:
        pass
    next_s = result.gaps_s[AT_TOKEN - 1] if len(result.tokens) > AT_TOKEN else None
    return result, {"noticed_s": watches[0].noticed_s, "next_token_s": next_s}


def measure_hangs(args: argparse.Namespace, cluster: LocalCluster) -> tuple[Any, Tally]:
    quant = args.quant[-1]
    path = model_path(args.model, args.models)
    (prompt,) = random_prompts(path, (PROMPT,), args.seed)
    rows, tally = [], Tally()
    with Replicas(cluster, path, quant, *args.server_options.split()) as replicas, replicas.client() as model:
        right = undisturbed(model, prompt, NEW_TOKENS)
        for number in range(args.hangs):
            victims: list[LocalServer] = []

            def stop(session: RemoteSession, number: int = number, victims: list[LocalServer] = victims) -> None:
                victims.append(replicas.find(session.hops[number % NUM_SPANS].server.peer_id))
                victims[-1].signal(signal.SIGSTOP)

            result, times = hang(model, prompt, stop)
            rows.append({"fault": "SIGSTOP", "hop": number % NUM_SPANS, **times})
            tally.add(model, quant, prompt, result, right)
            victims[0].kill()
            replicas.replace(victims[0])
            replicas.wait_ready()
    if not args.quick:
        try:
            rows += silences(args, cluster, path, quant, prompt, right, tally)
        except NoNamespaces as error:
            console.print(f"skipped servers whose packets are dropped: {error}")
    headings = ("times", "noticed after", "next token after")
    table = results_table("Servers that say nothing any more, seconds", "", *headings)
    for fault in dict.fromkeys(row["fault"] for row in rows):
        some = [row for row in rows if row["fault"] == fault]
        numbers = [spread([row[name] for row in some]) for name in ("noticed_s", "next_token_s")]
        table.add_row(fault, str(len(some)), *numbers)
    console.print(table)
    console.print(f"target: noticed within 5 s\n{tally}")
    return rows, tally


def silences(
    args: argparse.Namespace,
    cluster: LocalCluster,
    path: Path,
    quant: str,
    prompt: torch.Tensor,
    right: list[int],
    tally: Tally,
) -> list[dict[str, Any]]:
    """A server behind a network of its own, which swallows every packet from some moment on."""
    rows = []
    with silent_network() as network:
        options = ("--host", network.our_address, *args.server_options.split())
        with (
            Replicas(cluster, path, quant, *options, num_replicas=1) as replicas,
            silent_server(network, replicas, replicas.spans[1]),
        ):
            for _ in range(args.silences):
                with replicas.client() as model:
                    result, times = hang(model, prompt, network.silence)
                rows.append({"fault": "packets dropped", "hop": 1, **times})
                network.speak()
                with replicas.client() as model:
                    tally.add(model, quant, prompt, result, right)
    return rows
