"""One volunteer of a training run, for ``train_together.py``: obeys lines of JSON, and says in such lines what happens.

Orders: ``{"do": "go"}`` begins to train; ``{"do": "once"}`` has a volunteer that does not train bring a whole batch, so
that one averaging follows; ``{"do": "strike", "moment": …, "signal": …}`` has it send itself a signal at that moment;
``{"do": "leave"}``. Who is led, as in ``reducing as led``, leaves a meeting behind that goes on and repairs its result.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from compression import LanguageModel, batch
from torch import Tensor, nn

from swarm_training import TrainingConfig, TrainingRun
from swarm_training.averaging.round import AveragingRound
from swarm_training.meeting.attending import MeetingClient
from swarm_training.run.meetings import Averager
from swarm_training.run.state import TrainedState

MOMENTS = {
    "meeting": (MeetingClient, "attend"),
    "reducing": (AveragingRound, "serve_reduce"),
    "reducing as led": (AveragingRound, "serve_reduce"),
    "repairing": (AveragingRound, "repair"),
    "stepping": (TrainedState, "apply"),
}
BATCHES = 100_000  # at most, of one volunteer


@dataclass
class Task:
    """Attributes:
    size: of a vector that is trained on noise; 0: a small language model.
    call_s: what a call of ``samples`` takes beside its gradients, within ``jitter`` of it either way.
    steps: global steps until it stops; 0: never.
    """

    number: int = 0
    peers: list[str] = field(default_factory=list)
    size: int = 1000
    target: int = 4
    samples: int = 4
    call_s: float = 0.0
    jitter: float = 0.0
    steps: int = 0
    config: dict[str, Any] = field(default_factory=dict)


class Vector(nn.Module):
    """Its gradient is noise around the volunteer's number, so that the mean of an average shows who took part."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(size))
        self._gradient = torch.randn(size, generator=torch.Generator().manual_seed(number)) + number

    def loss(self) -> Tensor:
        return (self.weights * self._gradient).sum()


class Work:
    """Gradients, one call after the other."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self.model = Vector(task.number, task.size) if task.size else LanguageModel()
        self.calls = 0
        self._task = task
        self._chance = random.Random(task.number)

    def call(self) -> None:
        task = self._task
        time.sleep(task.call_s * self._chance.uniform(1 - task.jitter, 1 + task.jitter))
        if isinstance(self.model, Vector):
            self.model.loss().backward()
        else:
            self.model.loss(batch(BATCHES * task.number + self.calls, task.samples)).backward()
        self.calls += 1

    def digest(self) -> str:
        parameters = (each.detach().numpy().tobytes() for each in self.model.parameters())
        return hashlib.sha256(b"".join(parameters)).hexdigest()


@dataclass
class Orders:
    """From the standard input, as they come."""

    begin: queue.Queue[str] = field(default_factory=queue.Queue)
    strike: dict[str, str] = field(default_factory=dict)
    has_left: bool = False

    def read(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "strike":
                self.strike[order["moment"]] = order["signal"]
            else:
                self.has_left = order["do"] == "leave"
                self.begin.put(order["do"])


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **facts}), flush=True)


def watch(orders: Orders) -> None:
    """Has averagings say how long they took, and moments look whether they are to be struck."""
    average = Averager.average

    async def timed(self: Averager, gradient: Tensor) -> Any:
        arrived_s = time.monotonic()
        averaged = await average(self, gradient)
        got_s = time.monotonic()
        if averaged is not None:
            say("averaged", arrived_s=arrived_s, got_s=got_s, mean=float(averaged.gradient.mean()))
        return averaged

    Averager.average = timed  # type: ignore[method-assign]
    for moment, (kind, method) in MOMENTS.items():
        setattr(kind, method, _struck(getattr(kind, method), moment, orders))


def _struck(original: Any, moment: str, orders: Orders) -> Any:
    def method(*args: Any, **options: Any) -> Any:
        spared = moment == "reducing as led" and _leads(args[0])
        if not spared and (name := orders.strike.pop(moment, None)) is not None:
            say("struck", moment=moment)
            os.kill(os.getpid(), getattr(signal, name))
        return original(*args, **options)

    return method


def _leads(reducing: AveragingRound) -> bool:
    """Whether this volunteer leads the meeting: the group's name says who does."""
    group = reducing.group
    return group.id.split("/")[-2] == group.peer_ids[reducing._me]


def main(task: Task) -> None:
    torch.set_num_threads(1)
    orders = Orders()
    watch(orders)
    work = Work(task)
    parameters = list(work.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1) if task.size else torch.optim.Adam(parameters, lr=4e-3)
    config = TrainingConfig(**task.config)
    options = {"target_batch_size": task.target, "initial_peers": task.peers, "config": config}
    threading.Thread(target=orders.read, daemon=True).start()
    with TrainingRun("benchmark", parameters, optimizer, **options) as run:
        say("joined", peers=run.initial_peers, peer_id=run.peer_id, step=run.num_steps)
        while (order := orders.begin.get()) == "once":
            work.call()
            run.step(samples=task.target)
        if order == "go":
            train(run, work, task, orders)


def train(run: TrainingRun, work: Work, task: Task, orders: Orders) -> None:
    counted = 0  # calls behind earlier steps
    while not orders.has_left and (not task.steps or run.num_steps < task.steps):
        before = run.num_steps
        work.call()
        run.step(samples=task.samples)
        if run.num_steps != before:
            calls, counted = work.calls - counted, work.calls
            members = run.last_group
            say("step", step=run.num_steps, digest=work.digest(), calls=calls, members=members)
    loss = None
    if isinstance(work.model, LanguageModel):
        loss = held_out_loss(work.model)
    say("done", loss=loss)
    while not orders.has_left:
        orders.begin.get()


def held_out_loss(model: LanguageModel) -> float:
    with torch.no_grad():
        return float(model.loss(batch(-1, 512)))


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
