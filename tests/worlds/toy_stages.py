"""Stages of a small model in plain torch, a peer that hosts one, and the same training in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.errors import PeerBusy, PeerMoved
from swarm_protocol.net.tls import Certificate
from swarm_protocol.rpc.serving import start_server
from swarm_training.core.moment import Moment
from swarm_training.core.record import Progress
from swarm_training.stages.rpc.room import StageLimits
from swarm_training.stages.rpc.service import StagesService
from tests.worlds.identities import identity

T = TypeVar("T")
VOCABULARY, RUN, START = 16, "toys", Moment(0, 0)
_GRID = 2.0**-40  # sums of multiples of it are exact, see the engine's accumulator


@dataclass(frozen=True)
class ToyOutput:
    hidden: Tensor | None = None
    loss_sum: Tensor | None = None
    num_tokens: int | None = None


@dataclass(frozen=True)
class ToyGradients:
    inputs: Tensor | None
    parameters: list[Tensor]
    loss_sum: float | None = None
    num_tokens: int | None = None


class ToyStage:
    """Embeddings at first, a linear layer with tanh and skip, at last a head and the loss."""

    def __init__(self, index: int, num_stages: int, hidden_size: int = 8) -> None:
        self.index, self.num_stages, self.width = index, num_stages, hidden_size
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(index)
            self._embedding = nn.Embedding(VOCABULARY, hidden_size) if self.is_first else None
            self._linear = nn.Linear(hidden_size, hidden_size)
            self._head = nn.Linear(hidden_size, VOCABULARY) if self.is_last else None
        modules = [each for each in (self._embedding, self._linear, self._head) if each is not None]
        self.parameters = [parameter for module in modules for parameter in module.parameters()]

    def _run(self, inputs: Tensor, labels: Tensor | None) -> tuple[Tensor, int]:
        hidden = inputs if self._embedding is None else self._embedding(inputs)
        hidden = hidden + torch.tanh(self._linear(hidden))
        if self._head is None:
            return hidden, 0
        assert labels is not None
        logits, targets = self._head(hidden)[:, :-1], labels[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    def forward(self, inputs: Tensor, labels: Tensor | None = None, keeps: bool = True) -> ToyOutput:
        with torch.no_grad():
            output, num_tokens = self._run(inputs if self.is_first else inputs.float(), labels)
        return ToyOutput(loss_sum=output, num_tokens=num_tokens) if self.is_last else ToyOutput(output)

    def backward(
        self, inputs: Tensor, labels: Tensor | None = None, grad: Tensor | None = None, loss_scale: float = 1.0
    ) -> ToyGradients:
        given = inputs if self.is_first else inputs.float().detach().requires_grad_(True)
        output, num_tokens = self._run(given, labels)
        wanted = self.parameters if self.is_first else [*self.parameters, given]
        scaled = output / loss_scale if self.is_last else output
        found = list(torch.autograd.grad(scaled, wanted, None if grad is None else grad.float()))
        inputs_grad = None if self.is_first else found.pop()
        return ToyGradients(inputs_grad, found, *((float(output.detach()), num_tokens) if self.is_last else ()))


def exact(gradients: Sequence[Tensor]) -> Tensor:
    """Return all gradients, [n] in float64, rounded to a grid on which their sums are exact."""
    flat = torch.cat([each.reshape(-1) for each in gradients]).double()
    return (flat / _GRID).round() * _GRID


class Sums:
    """Exactly counted gradients of one stage, [n] in float64."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self.clear()

    def clear(self) -> None:
        self.total = torch.zeros(sum(each.numel() for each in self._parameters), dtype=torch.float64)
        self.done: set[int] = set()

    def add(self, number: int, gradients: Sequence[Tensor]) -> None:
        self.total += exact(gradients)
        self.done.add(number)


@dataclass
class ToyHost:
    """A peer of a stage that never averages by itself.

    Attributes:
        adding: called with every micro-batch that is added to the sums.
        gate: computing waits for it.
        not_finite: steps for which a trainer has said so.
    """

    stage: ToyStage
    num_micro_batches: int = 8
    moment: Moment = START
    max_pending: int = 100
    adding: Callable[[int], None] = lambda number: None
    gate: asyncio.Event | None = None
    pending: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)
    num_computed: int = 0
    not_finite: list[int] = field(default_factory=list)
    has_checkpoint: bool = False

    def __post_init__(self) -> None:
        self.peer = self.counting = self
        self.sums: Any = Sums(self.stage.parameters)
        self.sums.num_micro_batches = self.num_micro_batches
        self.sums.require_room, self.sums.forget = self.require_room, self.forget

    async def compute(self, work: Callable[[], T], share: float) -> T:
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        self.num_computed += 1
        return work()

    def require_room(self, number: int, trainer: str) -> None:
        if len(self.pending) >= self.max_pending:
            raise PeerBusy("too many micro-batches wait here for their commit")

    def add(self, step: int, number: int, trainer: str, gradients: ToyGradients) -> None:
        assert step == self.moment.step
        self.pending[number, trainer] = gradients.parameters

    async def commit(self, step: int, number: int, trainer: str) -> bool:
        if step != self.moment.step:
            raise PeerMoved("another step")
        gradients = self.pending.pop((number, trainer), None)
        if number not in self.sums.done and gradients is not None:
            self.sums.add(number, gradients)
            self.adding(number)
        return number in self.sums.done

    def note_not_finite(self, step: int) -> bool:
        self.not_finite.append(step)
        return self.has_checkpoint

    def forget(self, trainer: str) -> None:
        self.pending = {key: value for key, value in self.pending.items() if key[1] != trainer}

    def clear(self, moment: Moment) -> None:
        self.moment = moment
        self.pending.clear()
        self.sums.clear()


def tokens(step: int, number: int, rows: int = 2, positions: int = 6) -> Tensor:
    """Those of a micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(VOCABULARY, (rows, positions), generator=generator)


def in_one_process(
    stages: Sequence[ToyStage], step: int, num_micro_batches: int, scale: float
) -> tuple[float, list[Tensor]]:
    """The sum of losses, and each stage's sums, of a whole batch."""
    sums, loss = [Sums(stage.parameters) for stage in stages], 0.0
    for number in range(num_micro_batches):
        ids = tokens(step, number)
        inputs = [ids]
        for stage in stages[:-1]:
            hidden = stage.forward(inputs[-1]).hidden
            assert hidden is not None
            inputs.append(hidden)
        grad = None
        for stage, total in reversed(list(zip(stages, sums, strict=True))):
            labels = ids if stage.is_last else None
            found = stage.backward(inputs[stage.index], labels, grad, loss_scale=scale)
            loss += found.loss_sum or 0.0
            total.add(number, found.parameters)
            grad = found.inputs
    return loss, [total.total for total in sums]


@asynccontextmanager
async def serving(
    host: ToyHost,
    number: int = 0,
    limits: StageLimits | None = None,
    access: AccessControl | None = None,
    make: Callable[..., StagesService] = StagesService,
) -> AsyncIterator[tuple[Progress, StagesService]]:
    """The host on loopback, as the peer of ``identity(number)``."""
    service, certificate = make(RUN, host, limits, access), Certificate.generate()
    server, port = await start_server(service.add_to, certificate, "127.0.0.1", 0)
    try:
        address = f"127.0.0.1:{port}"
        yield Progress(RUN, identity(number).peer_id, address=address, tls_fingerprint=certificate.fingerprint), service
    finally:
        service.close()
        await server.stop(None)


def bits_of(numbers: Iterator[int] | Sequence[int] | set[int], size: int = 64) -> bytes:
    return sum(1 << number for number in numbers).to_bytes(size // 8, "little")
