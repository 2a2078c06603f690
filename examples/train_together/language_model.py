"""Four peers of different speeds train a language model from scratch; one is killed, another joins.

    python examples/train_together/language_model.py

The model is like the one that ships with Swarm, with fewer blocks, and so is the text: the documentation that every
Python carries. Afterwards one process takes as many steps of as many samples by itself, and the table shows the loss on
held-out text over the samples seen: it is the same.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from peers import Joined, Pace, Peer, Plan, Stepped, Work, events, train_alone
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from train_tiny_model import SHIPPED, collect_documents, token_stream

PACES = (Pace(8), Pace(4, pause_s=0.1), Pace(4, pause_s=0.4), Pace(2, pause_s=0.2))
VICTIM = 2  # has the part of the data with this number
JOINER = Pace(6)
MICRO_BATCH = 8  # of the single process
PEAK_RATE, WARMUP_STEPS = 1e-3, 20  # with 3e-3 at once, losses depend on the order of the data by 4 %
NUM_HELD_OUT = 64  # windows


@dataclass(frozen=True)
class Size:
    """``window``: tokens of a sample; ``seen_by_joiner``: steps that the run takes at least with the joiner.

    ``modules``: of the library, whose documentation is the text; None for all.
    """

    blocks: int = 4
    window: int = 64
    batch: int = 64
    steps: int = 60
    kill_at: int = 15
    join_at: int = 25
    seen_by_joiner: int = 10
    measure_every: int = 5
    modules: int | None = None


QUICK = Size(1, window=16, batch=32, steps=16, kill_at=2, join_at=4, seen_by_joiner=2, measure_every=1, modules=100)


def write_tokens(folder: Path, num_modules: int | None) -> Path:
    """``training.npy`` and ``held_out.npy``: the text as tokens of the shipped tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    documents = collect_documents(num_modules)
    for name, is_held_out in (("training", False), ("held_out", True)):
        chosen = [document for document in documents if document.is_held_out == is_held_out]
        np.save(folder / f"{name}.npy", token_stream(tokenizer, chosen).numpy())
    return folder


def build(folder: Path, size: Size) -> Work:
    """The same model for all who call it."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(SHIPPED, num_hidden_layers=size.blocks)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    training, held_out = (windows(folder / f"{name}.npy", size.window) for name in ("training", "held_out"))

    def loss(numbers: torch.Tensor) -> torch.Tensor:
        tokens = training[numbers]
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    @torch.no_grad()
    def held_out_loss() -> float:
        tokens = held_out[:: len(held_out) // NUM_HELD_OUT][:NUM_HELD_OUT]
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    return Work(model, optimizer, len(training), loss, held_out_loss, rate)


def windows(path: Path, length: int) -> torch.Tensor:
    """[count, length]"""
    stream = torch.from_numpy(np.load(path))
    return stream[: len(stream) // length * length].view(-1, length)


def rate(step: int) -> float:
    """Linear warm-up; it stays at its peak, as nobody knows how many steps will be taken."""
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS)


class Story:
    """What happened at each step, and the decisions that follow: to kill, to have one join, to end.

    Attributes:
        steps: by number, what the first peer that reported it said.
        forks: steps after which peers had different parameters.
    """

    def __init__(self, plan: Plan, size: Size) -> None:
        self.steps: dict[int, Stepped] = {}
        self.losses: dict[int, float] = {}
        self.forks: set[int] = set()
        self._size = size
        self._is_ending = False
        self.peers = [Peer(plan, 0, PACES[0], [])]
        self._plan = plan

    def run(self) -> None:
        """Until the run has taken enough steps, and all peers have left."""
        for peer, event in events(self.peers):
            if isinstance(event, Joined):
                self._note_joined(peer, event)
            else:
                self._note_step(peer, event)

    def _note_joined(self, peer: Peer, joined: Joined) -> None:
        if peer.part == 0:
            for part, pace in enumerate(PACES[1:], 1):
                self.peers.append(Peer(self._plan, part, pace, joined.initial_peers))
        elif peer.part == len(PACES):
            print(f"peer {peer.part} joined at step {joined.step}", flush=True)
            peer.go()
        elif all(each.joined for each in self.peers):
            for each in self.peers:
                each.go()

    def _note_step(self, peer: Peer, stepped: Stepped) -> None:
        first = self.steps.setdefault(stepped.step, stepped)
        if first.digest != stepped.digest:
            self.forks.add(stepped.step)
        if stepped.held_out_loss is not None:
            self.losses[stepped.step] = stepped.held_out_loss
            print(f"step {stepped.step}: {len(stepped.group)} peers, loss {stepped.held_out_loss:.3f}", flush=True)
        if peer.part == VICTIM and stepped.step >= self._size.kill_at and peer.process.is_alive():
            peer.kill()
            print(f"peer {VICTIM} was killed at step {stepped.step}", flush=True)
        if stepped.step >= self._size.join_at and len(self.peers) == len(PACES):
            addresses = self.peers[0].joined.initial_peers
            self.peers.append(Peer(self._plan, len(PACES), JOINER, addresses))
        if self._has_ended(stepped.step) and not self._is_ending:
            self._is_ending = True
            for each in self.peers:
                if each.process.is_alive():
                    each.leave()

    def _has_ended(self, step: int) -> bool:
        with_joiner = self.steps_with(len(PACES))
        return step >= self._size.steps and with_joiner >= self._size.seen_by_joiner and self._is_victim_dead()

    def _is_victim_dead(self) -> bool:
        return not self.peers[VICTIM].process.is_alive()

    def steps_with(self, part: int) -> int:
        """How many steps that peer has contributed to."""
        peers = [peer.joined.peer_id for peer in self.peers if peer.part == part and peer.joined]
        return sum(any(peer in stepped.group for peer in peers) for stepped in self.steps.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps, to see that it works")
    size = QUICK if parser.parse_args().quick else Size()
    with tempfile.TemporaryDirectory() as folder:
        work = functools.partial(build, write_tokens(Path(folder), size.modules), size)
        name = "language-model"
        plan = Plan(name, work, size.batch, len(PACES) + 1, size.measure_every, Path(folder) / "model.pt")
        story = Story(plan, size)
        story.run()
        last = max(story.losses)
        samples_of = {step: story.steps[step].samples for step in range(1, last + 1)}
        print(f"one process now takes {last} steps of as many samples", flush=True)
        alone = train_alone(plan, MICRO_BATCH, samples_of, set(story.losses))
    print("samples  step  peers  loss together  loss alone  difference")
    for step, together in sorted(story.losses.items()):
        samples = sum(samples_of[number] for number in range(1, step + 1))
        difference = together / alone[step] - 1
        print(
            f"{samples:7}  {step:4}  {len(story.steps[step].group):5}  {together:13.3f}  {alone[step]:10.3f}  "
            f"{difference:+10.1%}"
        )
    for part in range(len(story.peers)):
        print(f"peer {part} contributed to {story.steps_with(part)} of {len(story.steps)} steps")
    print(
        f"after {len(story.steps) - len(story.forks)} of {len(story.steps)} steps all parameters were equal bit for bit"
    )


if __name__ == "__main__":
    main()
