"""A mixture of experts on servers learns a language model better than one expert does, though a tenth of them dies.

    python examples/experts.py

The model predicts the next character of Python's language reference from the eight before it. Its layers and its gate
are here; its 20 experts are on four servers, processes of their own, and each character goes to the best four. After a
third of the steps the server with a tenth of the experts is killed (SIGKILL), and after two thirds another one appears.
The same model with one expert of the same size, here, takes as many steps on the same batches.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from swarm_training.experts import MixtureConfig, RemoteMixtureOfExperts
from swarm_training.experts.server.registry import feedforward

NAME, HIDDEN, GRID = "characters", 32, (4, 8)
SERVERS = (6, 6, 6, 2)  # experts of each; the last one is killed
K = 4
SEEN = 8  # characters
EMBEDDED = 16
VOCABULARY = 128
BATCH, HELD_OUT_BATCH = 256, 4096
RATE = 3e-3
BALANCE = 0.01


class Characters:
    """Python's language reference, of which the last tenth is held out."""

    def __init__(self) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics))
        self._ids = torch.tensor([min(ord(character), VOCABULARY - 1) for character in text])
        self._end = len(self._ids) * 9 // 10
        self.held_out = self._windows(self._end, len(self._ids), HELD_OUT_BATCH, torch.Generator().manual_seed(1))

    def batches(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """[BATCH, SEEN] and the character that follows each, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            yield self._windows(0, self._end, BATCH, generator)

    def _windows(
        self, start: int, end: int, count: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(start, end - SEEN, (count,), generator=generator)
        windows = self._ids[at[:, None] + torch.arange(SEEN + 1)]
        return windows[:, :-1], windows[:, -1]


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDED)
        self.enter = nn.Linear(EMBEDDED * SEEN, HIDDEN)
        self.middle = middle
        self.leave = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY))

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(self.embedding(characters).flatten(1))
        return self.leave(hidden + self.middle(hidden))


class Server:
    """``python -m swarm_training.experts serve`` as a process of its own."""

    def __init__(self, experts: int, *initial_peers: str) -> None:
        command = [sys.executable, "-m", "swarm_training.experts", "serve", "--name", NAME, "--hidden", str(HIDDEN)]
        command += ["--grid", *map(str, GRID), "--experts", str(experts), "--learning-rate", str(RATE)]
        command += ["--initial-peers", *initial_peers] if initial_peers else []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_ready(self) -> dict[str, str]:
        """The fields of the line that it prints then."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit("a server did not start")
        return dict(field.split("=", 1) for field in line.split()[1:])


@contextmanager
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    try:
        yield started
    finally:
        for server in started:
            server.process.terminate()
        for server in started:
            server.process.wait()


@torch.no_grad()
def held_out_loss(model: nn.Module, characters: Characters) -> float:
    """Nats per character."""
    inputs, targets = characters.held_out
    return F.cross_entropy(model(inputs), targets).item()


def train(model: Model, characters: Characters, steps: int) -> Iterator[int]:
    """Yields the number of each step before it is taken."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for step, (inputs, targets) in enumerate(characters.batches(steps)):
        yield step
        loss = F.cross_entropy(model(inputs), targets)
        if isinstance(model.middle, RemoteMixtureOfExperts):
            loss = loss + BALANCE * model.middle.balance_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def one_expert(characters: Characters, steps: int) -> float:
    torch.manual_seed(0)
    model = Model(feedforward(HIDDEN))
    for _ in train(model, characters, steps):
        pass
    return held_out_loss(model, characters)


def mixture(characters: Characters, steps: int) -> float:
    """Its held-out loss; prints what happens."""
    with servers() as running:
        running.append(Server(SERVERS[0]))
        peer = running[0].wait_ready()["initial_peer"]
        running += [Server(experts, peer) for experts in SERVERS[1:]]
        victim = running[-1]
        ready = [server.wait_ready() for server in running[1:]]
        print(f"{sum(SERVERS)} experts on {len(SERVERS)} servers", flush=True)
        torch.manual_seed(0)
        middle = RemoteMixtureOfExperts(
            HIDDEN, GRID, K, name=NAME, initial_peers=[peer], config=MixtureConfig(refresh_s=2.0)
        )
        model = Model(middle)
        used: set[tuple[int, ...]] = set()
        new = ""
        for step in train(model, characters, steps):
            if step == steps // 3:
                victim.process.kill()
                victim.process.wait()
                print(f"step {step}: killed the server of {ready[-1]['experts']}", flush=True)
            if step == steps * 2 // 3:
                running.append(Server(SERVERS[-1], peer))
                new = running[-1].wait_ready()["experts"]
                print(f"step {step}: a new server has {new}", flush=True)
            if step % max(1, steps // 10) == 0:
                print(f"step {step}: held-out loss {held_out_loss(model, characters):.3f}", flush=True)
            elif new:
                used |= {tuple(cell) for cell in middle.cells[middle.answered].tolist()}
        taken = sum(tuple(map(int, name.split(".")[1:])) in used for name in new.split(","))
        print(f"{taken} of {SERVERS[-1]} new experts are in use", flush=True)
        loss = held_out_loss(model, characters)
        middle.close()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    characters = Characters()
    start = time.monotonic()
    remote = mixture(characters, steps)
    print(f"{time.monotonic() - start:.0f} s")
    alone = one_expert(characters, steps)
    print(f"held-out loss after {steps} steps: {alone:.3f} with one expert, {remote:.3f} with the mixture")
    print("the mixture is better" if remote < alone else "the mixture is not better")


if __name__ == "__main__":
    main()
