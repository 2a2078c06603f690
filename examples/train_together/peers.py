"""Starts the peers of a run as processes of this machine, and trains the same alone for comparison."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor, nn

from swarm_training import TrainingRun
from swarm_training.data.order import DataShard, PartCursor, SampleOrder

_PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Work:
    """What is trained.

    Attributes:
        loss: the mean over samples, given by their numbers from 0 to num_samples − 1.
        held_out_loss: on samples that are not trained on.
        rate: the learning rate of a global step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    num_samples: int
    loss: Callable[[Tensor], Tensor]
    held_out_loss: Callable[[], float]
    rate: Callable[[int], float]


@dataclass(frozen=True)
class Pace:
    """How fast a peer is: samples of a call, and seconds of rest before each, which stand for a slower machine."""

    batch_size: int
    pause_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Of a run. ``build`` is a function of a module, as all of this goes to other processes.

    Attributes:
        parts: of the data, of which each peer has one.
        measure_every: global steps between two measurements of the held-out loss, by the peer of part 0.
        result: where that peer leaves the model's parameters in the end.
    """

    name: str
    build: Callable[[], Work]
    target_batch_size: int
    parts: int
    measure_every: int
    result: Path


@dataclass(frozen=True)
class Joined:
    peer_id: str
    initial_peers: list[str]
    step: int


@dataclass(frozen=True)
class Stepped:
    """A global step at a peer. ``digest``: SHA-256 of the parameters; ``samples``: that were averaged, of all peers."""

    step: int
    samples: int
    group: list[str]
    digest: str
    held_out_loss: float | None


class Peer:
    """A process that trains one part of the data. It starts to train with ``go``."""

    def __init__(self, plan: Plan, part: int, pace: Pace, initial_peers: list[str]) -> None:
        self.part = part
        self.connection, other = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_train, args=(plan, part, pace, initial_peers, other), daemon=True)
        self.process.start()
        other.close()
        self.joined: Joined | None = None

    def go(self) -> None:
        self.connection.send("go")

    def leave(self) -> None:
        self.connection.send("leave")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def events(peers: list[Peer]) -> Iterator[tuple[Peer, Joined | Stepped]]:
    """What peers say, until all of them have ended; peers may be added to the list meanwhile.

    Raises:
        RuntimeError: a process has failed.
    """
    ended: set[Peer] = set()
    while running := {peer.connection: peer for peer in peers if peer not in ended}:
        for connection in wait(list(running)):
            peer = running[connection]
            try:
                event = peer.connection.recv()
            except (EOFError, ConnectionResetError):
                ended.add(peer)
                peer.process.join()
                if peer.process.exitcode and peer.process.exitcode > 0:
                    raise RuntimeError(f"the peer with part {peer.part} has failed") from None
                continue
            if isinstance(event, Joined):
                peer.joined = event
            yield peer, event


def _train(plan: Plan, part: int, pace: Pace, initial_peers: list[str], connection: Connection) -> None:
    """The process of one peer: two lines of it are ``TrainingRun`` and ``run.step``."""
    torch.set_num_threads(1)
    work = plan.build()
    parameters = list(work.model.parameters())
    cursor = PartCursor(SampleOrder(plan.name, work.num_samples), DataShard(part, plan.parts))
    target = plan.target_batch_size
    with TrainingRun(
        plan.name, parameters, work.optimizer, target_batch_size=target, initial_peers=initial_peers
    ) as run:
        work.optimizer.register_step_pre_hook(lambda *_: set_rate(work, run.num_steps))
        connection.send(Joined(run.peer_id, run.initial_peers, run.num_steps))
        connection.recv()
        while not connection.poll():
            time.sleep(pace.pause_s)
            step = run.num_steps
            work.loss(torch.from_numpy(cursor.take(pace.batch_size))).backward()
            run.step(samples=pace.batch_size)
            if run.num_steps > step:
                is_due = part == 0 and run.num_steps // plan.measure_every > step // plan.measure_every
                loss = work.held_out_loss() if is_due else None
                digest = digest_of(work.model)
                connection.send(Stepped(run.num_steps, run.last_batch_size, run.last_group, digest, loss))
        if part == 0:
            torch.save(work.model.state_dict(), plan.result)


def train_alone(plan: Plan, micro_batch: int, samples_of: Mapping[int, int], measured: set[int]) -> dict[int, float]:
    """The held-out loss after the ``measured`` steps of one process, without a run.

    samples_of: how many samples each global step from 1 on has; ``micro_batch``: that are computed at once.
    """
    work = plan.build()
    cursor = PartCursor(SampleOrder(plan.name, work.num_samples))
    losses = {}
    for step in sorted(samples_of):
        numbers = torch.from_numpy(cursor.take(samples_of[step]))
        for part in numbers.split(micro_batch):
            (work.loss(part) * len(part) / len(numbers)).backward()
        set_rate(work, step - 1)
        work.optimizer.step()
        work.optimizer.zero_grad()
        if step in measured:
            losses[step] = work.held_out_loss()
    return losses


def set_rate(work: Work, step: int) -> None:
    for group in work.optimizer.param_groups:
        group["lr"] = work.rate(step)


def digest_of(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
