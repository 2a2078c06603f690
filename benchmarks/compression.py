"""What compressed gradients cost in loss: bytes per step, and the held-out loss after equal samples.

    python benchmarks/compression.py [--steps 200] [--seeds 3] [--only NAME …] [--quick] [--json FILE]

4 simulated peers train a small Transformer on a Markov chain of the second order, 8 rows each and step. Gradients
travel as in a run: every peer's parts are encoded for their owners, and the owners' means are encoded for all. Bytes
are those that one peer sends per step of its own gradient and of the means, for each element of the model.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import json_row, write_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from swarm_training.compression.codecs import codec_of
from swarm_training.compression.compressor import Compressor, Plain
from swarm_training.compression.error_feedback import ChunkPlace, ErrorFeedback
from swarm_training.compression.power_sgd import PowerSGD
from swarm_training.optim.lamb import LAMB
from swarm_training.optim.offload import AdamW8bit, LAMB8bit

PEERS, ROWS, LENGTH, VOCAB, HIDDEN, LAYERS = 4, 8, 32, 32, 48, 2
HELD_OUT = 10**7
MOST_LOSS = 1.01  # of the loss of fp32, for codecs
QUICK_STEPS, QUICK_SEEDS = 20, 1
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=4e-3)


@dataclass(frozen=True)
class Setup:
    """One way to train. ``delay``: steps by which an average is applied late; ``is_judged``: it may lose 1 %."""

    codec: str = "fp32"
    has_feedback: bool = False
    rank: int | None = None
    delay: int = 0
    optimizer: Make = adam
    is_judged: bool = False


SETUPS = {
    "fp32": Setup(),
    "fp16": Setup("fp16", is_judged=True),
    "int8": Setup("int8", is_judged=True),
    "int8, error feedback": Setup("int8", has_feedback=True, is_judged=True),
    "PowerSGD, rank 4": Setup(rank=4),
    "PowerSGD, rank 8": Setup(rank=8),
    "PowerSGD, rank 8, int8": Setup("int8", rank=8),
    "delayed by a step": Setup(delay=1),
    "LAMB": Setup(optimizer=lambda parameters: LAMB(parameters, lr=0.02, weight_decay=0.0)),
    "LAMB, 8-bit states": Setup(optimizer=lambda parameters: LAMB8bit(parameters, lr=0.02, weight_decay=0.0)),
    "AdamW, 8-bit states": Setup(
        optimizer=lambda parameters: AdamW8bit(parameters, lr=4e-3, eps=1e-8, weight_decay=0.0)
    ),
}


class LanguageModel(nn.Module):
    def __init__(self, hidden: int = HIDDEN, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, hidden)
        self.positions = nn.Parameter(torch.randn(LENGTH, hidden) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, 4, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def loss(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids[:, :-1]) + self.positions[: ids.shape[1] - 1]
        causal = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=causal, is_causal=True)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def batch(index: int, rows: int = ROWS) -> Tensor:
    """int64 [rows, LENGTH]: a token follows from the two before it, but for one in ten."""
    generator = torch.Generator().manual_seed(1_000_003 + index)
    ids = torch.randint(VOCAB, (rows, LENGTH), generator=generator)
    is_noise = torch.rand(rows, LENGTH, generator=generator) < 0.1
    for place in range(2, LENGTH):
        ids[:, place] = torch.where(
            is_noise[:, place], ids[:, place], (3 * ids[:, place - 1] + 5 * ids[:, place - 2] + 7) % VOCAB
        )
    return ids


class Group:
    """Averages vectors as a round does: the peers' through a codec, and the mean through it again."""

    def __init__(self, setup: Setup) -> None:
        self._codec = codec_of(setup.codec)
        self._there = [ErrorFeedback(self._codec) for _ in range(PEERS)] if setup.has_feedback else None
        self._back = ErrorFeedback(self._codec)
        self.sent_bytes = 0

    def mean(self, vectors: list[Tensor]) -> Tensor:
        n = len(vectors[0])
        self.sent_bytes += 2 * self._codec.size_bytes(n) * (PEERS - 1) // PEERS
        if self._there is None:
            encoded = [self._codec.encode(vector) for vector in vectors]
            mean = torch.stack([self._codec.decode(data, n) for data in encoded]).mean(0)
            return self._codec.decode(self._codec.encode(mean), n)
        place = ChunkPlace("gradient", 0, n)
        encoded = [feedback.encode(place, vector) for feedback, vector in zip(self._there, vectors, strict=True)]
        mean = torch.stack([self._codec.decode(data, n) for data in encoded]).mean(0)
        result = self._codec.decode(self._back.encode(place, mean), n)
        for feedback in (*self._there, self._back):
            feedback.commit({place})
        return result

    def average(self, compressors: list[Compressor], gradients: list[Tensor]) -> Tensor:
        phases = [compressor.phases(gradient) for compressor, gradient in zip(compressors, gradients, strict=True)]
        vectors = [next(phase) for phase in phases]
        while True:
            mean, vectors, results = self.mean(vectors), [], []
            for phase in phases:
                try:
                    vectors.append(phase.send(mean))
                except StopIteration as stop:
                    results.append(stop.value)
            if results:
                return results[0]


def train(setup: Setup, steps: int, seed: int) -> tuple[float, float]:
    """The held-out loss, and bytes per step and element that a peer sends."""
    torch.manual_seed(seed)
    model = LanguageModel()
    parameters = list(model.parameters())
    optimizer, group = setup.optimizer(parameters), Group(setup)
    shapes = [tuple(parameter.shape) for parameter in parameters]
    compressors: list[Compressor] = [
        PowerSGD(shapes, setup.rank) if setup.rank is not None else Plain() for _ in range(PEERS)
    ]
    waiting: deque[Tensor] = deque()
    for step in range(steps):
        gradients = []
        for peer in range(PEERS):
            model.zero_grad()
            model.loss(batch((seed * steps + step) * PEERS + peer)).backward()
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        waiting.append(group.average(compressors, gradients))
        if len(waiting) > setup.delay:
            parts = waiting.popleft().split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()
            optimizer.step()
    num_elements = sum(parameter.numel() for parameter in parameters)
    with torch.no_grad():
        return model.loss(batch(HELD_OUT, 128)).item(), group.sent_bytes / steps / num_elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(SETUPS), metavar="NAME", default=list(SETUPS))
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.seeds = QUICK_STEPS, QUICK_SEEDS
    torch.set_num_threads(1)
    rows = list[dict[str, Any]]()
    table = Table("gradients", "held-out loss, median of seeds", "all", "× fp32", "bytes per element and step")
    reference: list[float] = []
    for name in dict.fromkeys(["fp32", *arguments.only]):
        setup = SETUPS[name]
        runs = [train(setup, arguments.steps, seed) for seed in range(arguments.seeds)]
        losses, sent = [loss for loss, _ in runs], runs[0][1]
        reference = reference or losses
        ratio = statistics.median(loss / beside for loss, beside in zip(losses, reference, strict=True))
        shown = " ".join(f"{loss:.3f}" for loss in losses)
        table.add_row(name, f"{statistics.median(losses):.3f}", shown, f"{ratio:.3f}", f"{sent:.2f}")
        target = MOST_LOSS if setup.is_judged else None
        beside = statistics.median(reference)
        row = json_row(
            name, statistics.median(losses), target, beside=beside, ratio=ratio, at_most=True, losses=losses, bytes=sent
        )
        rows.append(row)
    Console().print(table)
    if arguments.json:
        write_json(arguments.json, vars(arguments), rows=rows)


if __name__ == "__main__":
    main()
