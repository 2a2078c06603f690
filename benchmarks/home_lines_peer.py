"""One peer of ``home_lines.py``: trains for a time, and says in lines of JSON what it has done.

The order ``{"do": "go"}`` begins; ``{"do": "leave"}`` ends the process.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from compression import LanguageModel, batch

from swarm_training import LocalSteps, TrainingConfig, TrainingRun
from swarm_training.compression.codecs import codec_of
from swarm_training.compression.error_feedback import ErrorFeedback

BATCHES = 100_000  # at most, of one peer
HELD_OUT, HELD_OUT_ROWS = -1, 128


@dataclass
class Task:
    """What one peer does.

    Attributes:
        hidden, layers: of its model.
        rows: of a call.
        call_s: the time of a call: it sleeps for what its gradient does not need.
        for_s: until it stops.
        target: rows of all peers between two averages.
        inner_rows: rows of a local step; 0: there are no local steps.
    """

    number: int = 0
    peers: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"
    hidden: int = 64
    layers: int = 2
    rows: int = 4
    call_s: float = 1.0
    for_s: float = 10.0
    target: int = 64
    inner_rows: int = 0
    lr: float = 5e-4
    config: dict[str, Any] = field(default_factory=dict)


def held_out_loss(model: LanguageModel) -> float:
    """Return the mean loss in nats per token of rows on which no peer trains."""
    with torch.no_grad():
        return float(model.loss(batch(HELD_OUT, HELD_OUT_ROWS)))


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def run_of(task: Task, model: LanguageModel) -> TrainingRun:
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=task.lr)
    config = TrainingConfig(host=task.host, straggler_s=300, max_meeting_s=300, **task.config)
    encoder = ErrorFeedback(codec_of(config.codec)) if task.inner_rows else None
    return TrainingRun(
        "lines",
        parameters,
        None if task.inner_rows else optimizer,
        target_batch_size=task.target,
        initial_peers=task.peers,
        config=config,
        encoder=encoder,
        local=LocalSteps(optimizer, batch_size=task.inner_rows) if task.inner_rows else None,
    )


def main(task: Task) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LanguageModel(task.hidden, task.layers)
    with run_of(task, model) as run:
        say("joined", peers=run.initial_peers, peer_id=run.peer_id)
        sys.stdin.readline()
        train(task, model, run)
        sys.stdin.readline()


def train(task: Task, model: LanguageModel, run: TrainingRun) -> None:
    """Train until the time is over. All numbers are those of the last average; ``rows`` are those of all peers.

    After it, a peer may wait for another one that has already stopped, so that time does not count.
    """
    began_s, computing_s = time.monotonic(), 0.0
    calls, averages, rows, share = 0, 0, 0, 0.0
    while time.monotonic() - began_s < task.for_s:
        call_s = time.monotonic()
        model.loss(batch(BATCHES * task.number + calls, task.rows)).backward()
        time.sleep(max(call_s + task.call_s - time.monotonic(), 0))
        computing_s += time.monotonic() - call_s
        calls += 1
        run.step(samples=task.rows)
        if run.num_steps != averages:
            averages, rows = run.num_steps, rows + run.last_batch_size
            share = computing_s / (time.monotonic() - began_s)
    if not averages:
        raise SystemExit("there was no average in the given time: expected more time")
    with run.shared_parameters():
        loss = held_out_loss(model)
    say("done", share=share, rows=rows, averages=averages, loss=loss)


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
