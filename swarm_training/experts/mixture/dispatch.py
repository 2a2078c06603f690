"""The dispatch of rows to experts: it finds the experts of each row, calls them, and collects timely answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from swarm_protocol.errors import AccessDenied, BadReply, PeerBusy, PeerUnavailable, SwarmError
from swarm_training.experts.core.cells import Cell
from swarm_training.experts.core.config import MixtureConfig, max_rows
from swarm_training.experts.directory.directory import ExpertCache, Failure
from swarm_training.experts.directory.records import ExpertHolder
from swarm_training.experts.net.calls import GrpcCalls
from swarm_training.experts.search.beam import BeamResult, Floats, Ints, Mask, beam_search

_ATTEMPTS = 3  # for a row that too few experts have answered


@dataclass(frozen=True, eq=False)
class DispatchedRows:
    """One call to one expert: the rows of the batch, and the expert's place among the experts of each row."""

    cell: Cell
    holder: ExpertHolder
    rows: torch.Tensor  # [m], int64
    slots: torch.Tensor  # [m], int64


@dataclass(frozen=True, eq=False)
class ExpertOutputs:
    """The answers of one forward pass."""

    cells: torch.Tensor  # [rows, k, dimensions], best first; -1 where there are fewer than k
    answered: torch.Tensor  # [rows, k], whether the expert answered in time
    outputs: torch.Tensor  # [rows, k, hidden]; 0 where there is no answer
    calls: list[DispatchedRows]  # the calls that were answered, and that the backward pass makes again
    living: list[torch.Tensor]  # for each dimension, [size], whether a coordinate may have living experts


class Dispatcher:
    """The dispatcher of one layer, used on one event loop only. Tensors are on the CPU, in fp32."""

    def __init__(
        self, name: str, hidden: int, k: int, directory: ExpertCache, calls: GrpcCalls, config: MixtureConfig
    ) -> None:
        self._name = name
        self._max_rows = max_rows(hidden)
        self._k = k
        self._directory = directory
        self._calls = calls
        self._config = config

    async def forward(self, rows: torch.Tensor, scores: Sequence[Floats]) -> ExpertOutputs:
        """Call the k best living experts of each row, and others if fewer than ``k_min`` have answered.

        Args:
            rows: [rows, hidden].
            scores: for each dimension, [rows, size].

        Raises:
            PeerUnavailable: fewer than ``k_min`` experts have answered for some row, in spite of further attempts.
            AccessDenied: the swarm is private, and this client is not a member.
        """
        shape = len(rows), self._k
        cells = np.full((*shape, len(scores)), -1, np.int64)
        outputs, answered = torch.zeros(*shape, rows.shape[1]), torch.zeros(shape, dtype=torch.bool)
        holders: dict[Cell, ExpertHolder] = {}
        living: list[Mask] = []
        problem: SwarmError | None = None
        failures: set[Failure] = set()  # of this pass, which are never tried again in it
        todo = np.arange(len(rows))
        for _ in range(_ATTEMPTS):
            found = await self._search([own[todo] for own in scores], failures)
            living = living or found.living
            cells[todo], outputs[todo], answered[todo] = found.cells, 0.0, False
            is_todo = np.zeros(len(rows), bool)
            is_todo[todo] = True
            holder_of = partial(self._directory.holder, without=failures)
            asked = self._planned(cells, is_todo[:, None] & (cells[:, :, 0] >= 0), holder_of)
            results = await self._ask(
                asked,
                lambda call: self._calls.forward(call.holder, self._name, call.cell, rows[call.rows]),
                self._config.timeout_s,
                failures,
            )
            for call, result in zip(asked, results, strict=True):
                if isinstance(result, torch.Tensor):
                    outputs[call.rows, call.slots] = result
                    answered[call.rows, call.slots] = True
                    holders[call.cell] = call.holder
                else:
                    problem = result
            todo = np.flatnonzero(answered.sum(1).numpy() < self._config.k_min)
            if not len(todo):
                break
            self._directory.forget()  # cells may have other servers by now
        if len(todo):
            raise problem if isinstance(problem, AccessDenied) else self._too_few(len(todo), len(rows), problem)
        calls = self._planned(cells, answered.numpy(), holders.get)
        return ExpertOutputs(
            torch.from_numpy(cells), answered, outputs, calls, [torch.from_numpy(mask) for mask in living]
        )

    async def backward(
        self, rows: torch.Tensor, grad_outputs: torch.Tensor, calls: Sequence[DispatchedRows]
    ) -> torch.Tensor:
        """Return the gradient of the rows, [rows, hidden]. An expert that does not answer in time contributes nothing.

        Args:
            rows: [rows, hidden], the rows of the forward pass.
            grad_outputs: [rows, k, hidden].
            calls: the calls that ``forward`` has returned.

        Raises:
            PeerUnavailable: no expert has answered.
            AccessDenied: this client is not a member with the role of a trainer.
        """
        results = await self._ask(
            calls,
            lambda call: self._calls.backward(
                call.holder, self._name, call.cell, rows[call.rows], grad_outputs[call.rows, call.slots]
            ),
            self._config.backward_timeout_s,
        )
        grad = torch.zeros_like(rows)
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, torch.Tensor):
                grad.index_add_(0, call.rows, result)
        problems = [result for result in results if not isinstance(result, torch.Tensor)]
        if problems and len(problems) == len(results):
            if isinstance(problems[-1], AccessDenied):
                raise problems[-1]
            raise PeerUnavailable(f"no expert of {self._name} has answered the backward pass: {problems[-1]}")
        return grad

    async def close(self) -> None:
        self._directory.close()

    async def _search(self, scores: Sequence[Floats], without: Collection[Failure]) -> BeamResult:
        search = beam_search(scores, self._k, max(self._config.beam, self._k))
        try:
            wanted = next(search)
            while True:
                wanted = search.send(await self._directory.following(wanted, without))
        except StopIteration as end:
            found: BeamResult = end.value
            return found

    def _planned(
        self, cells: Ints, wanted: Mask, holder_of: Callable[[Cell], ExpertHolder | None]
    ) -> list[DispatchedRows]:
        """Return the calls for the ``wanted`` places of ``cells``, [rows, k]; rows of one expert share calls."""
        rows, slots = np.nonzero(wanted)
        if not len(rows):
            return []
        named, numbers = np.unique(cells[rows, slots], axis=0, return_inverse=True)
        numbers = numbers.reshape(-1)  # NumPy 2.0 returns them with another dimension
        order = np.argsort(numbers, kind="stable")
        ends = np.cumsum(np.bincount(numbers, minlength=len(named)))
        calls = []
        for coordinates, places in zip(named.tolist(), np.split(order, ends[:-1]), strict=True):
            cell = tuple(coordinates)
            holder = holder_of(cell)
            if holder is None:  # the directory has been read again since the search
                continue
            for part in torch.from_numpy(places).split(self._max_rows):
                calls.append(DispatchedRows(cell, holder, torch.from_numpy(rows)[part], torch.from_numpy(slots)[part]))
        return calls

    async def _ask(
        self,
        calls: Sequence[DispatchedRows],
        ask: Callable[[DispatchedRows], Coroutine[Any, Any, torch.Tensor]],
        timeout_s: float,
        failures: set[Failure] | None = None,
    ) -> list[torch.Tensor | SwarmError]:
        """Return each timely answer, or the error. Failed experts are left out of the next searches, and added to
        ``failures``."""
        tasks = [asyncio.ensure_future(ask(call)) for call in calls]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=timeout_s)
            results = [_outcome(task, timeout_s) for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        served = {call.holder for call, result in zip(calls, results, strict=True) if isinstance(result, torch.Tensor)}
        for call, result in zip(calls, results, strict=True):
            if isinstance(result, torch.Tensor):
                self._directory.answered(call.holder, call.cell)
            elif not isinstance(result, PeerBusy):
                is_all = isinstance(result, PeerUnavailable | BadReply) and call.holder not in served
                what = () if is_all else call.cell
                self._directory.failed(call.holder, what)
                if failures is not None:
                    failures.add((call.holder.peer_id, what))
        return results

    def _too_few(self, num_rows: int, of: int, problem: SwarmError | None) -> PeerUnavailable:
        why = "no server that can be called is known" if problem is None else f"the last one failed: {problem}"
        return PeerUnavailable(
            f"{num_rows} of {of} rows have answers of fewer than {self._config.k_min} experts of {self._name}: {why}"
        )


def _outcome(task: asyncio.Task[torch.Tensor], timeout_s: float) -> torch.Tensor | SwarmError:
    if not task.done():
        return PeerUnavailable(f"the expert has not answered within {timeout_s:g} s")
    error = task.exception()
    if isinstance(error, SwarmError):
        return error
    return task.result()  # raises an error that is a bug of ours
