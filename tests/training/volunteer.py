"""A process that takes part in a run, by a plain loop; it says in lines of JSON what happens."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_training import TrainingConfig, TrainingRun
from swarm_training.averaging.round import AveragingRound
from swarm_training.meeting.attending import MeetingClient

RUN = "toy"
MOMENTS = {
    "meeting": (MeetingClient, "attend"),
    "reducing": (AveragingRound, "serve_reduce"),
}


@dataclass
class Task:
    """Attributes:
    steps: global steps until it leaves.
    moment: at which the process sends itself ``signal``, at global step ``at_step``.
    """

    number: int = 0
    peers: list[str] = field(default_factory=list)
    target: int = 32
    samples: int = 4
    call_s: float = 0.01
    steps: int = 4
    size: int = 50
    moment: str = ""
    at_step: int = 1
    signal: str = "SIGKILL"
    config: dict[str, Any] = field(default_factory=dict)
    membership: str = ""  # a file


def model(size: int) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(size, 3)


def batch(number: int, call: int, samples: int, size: int) -> torch.Tensor:
    """[samples, size]: the data of one call of one peer."""
    return torch.randn(samples, size, generator=torch.Generator().manual_seed(1000 * number + call))


def loss_of(trained: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return trained(inputs).sin().square().mean(1).mean()


def digest(trained: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in trained.parameters())).hexdigest()


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def meet_until_told_to_go(run: TrainingRun) -> None:
    """Says each time it is told to when it has heard of as many peers."""
    for line in sys.stdin:
        if line.strip() == "go":
            return
        while run.num_peers < int(line.removeprefix("meet ")):
            time.sleep(0.05)
        say("met")


def member(path: str) -> dict[str, Any]:
    """How a member of a private run takes part."""
    if not path:
        return {}
    credentials = MemberCredentials.read(Path(path))
    access = AccessControl(credentials.grant.swarm_key)
    return {"identity": credentials.identity_or(None), "token": credentials.token, "access": access}


def strike(task: Task) -> None:
    """Has the process send itself a signal at that moment, once: of several calls that wait then the others go on."""
    kind, method = MOMENTS[task.moment]
    original = getattr(kind, method)
    strikes = iter([True])

    def struck(*args: Any, **options: Any) -> Any:
        if run is not None and run.num_steps == task.at_step and next(strikes, False):
            say("struck", moment=task.moment)
            os.kill(os.getpid(), getattr(signal, task.signal))
        return original(*args, **options)

    setattr(kind, method, struck)


run: TrainingRun | None = None


def main(task: Task) -> None:
    global run
    torch.set_num_threads(1)
    if task.moment:
        strike(task)
    trained = model(task.size)
    run = TrainingRun(
        RUN,
        trained.parameters(),
        torch.optim.AdamW(trained.parameters(), lr=0.01),
        initial_peers=task.peers,
        target_batch_size=task.target,
        config=TrainingConfig(**task.config),
        **member(task.membership),
    )
    with run:
        say("joined", peers=run.initial_peers, peer_id=run.peer_id, step=run.num_steps, digest=digest(trained))
        meet_until_told_to_go(run)
        call = 0
        while run.num_steps < task.steps:
            time.sleep(task.call_s)
            loss = loss_of(trained, batch(task.number, call, task.samples, task.size))
            loss.backward()
            before = run.num_steps
            run.step(samples=task.samples, loss=loss.item())
            call += 1
            if run.num_steps != before:
                say("step", step=run.num_steps, digest=digest(trained), calls=call, members=run.last_group)
        say("done")
        while sys.stdin.readline() == "ledger\n":
            say("ledger", totals={user: [total.samples, total.rounds] for user, total in run.ledger.items()})


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
