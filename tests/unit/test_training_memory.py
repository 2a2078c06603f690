"""What training keeps: within its share of the cache, given up when sessions need the room, dropped when unused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from swarm_protocol.errors import Forgotten, PeerBusy
from swarm_protocol.int8_linear import FbgemmWeight, Int8Weight, quantize_rows
from swarm_server.kv_cache import CacheBudget
from swarm_server.recording import Recorded
from swarm_server.training_memory import TrainingMemory
from tests.unit.support import run, until

CAPACITY = 1000
KEYS = [bytes([number]) * 16 for number in range(6)]
needs_fbgemm = pytest.mark.skipif(not FbgemmWeight.is_available(), reason="this torch has no fbgemm")


def recorded(size_bytes: int) -> Recorded:
    output = torch.zeros(1, 1, 1)
    return Recorded(output, (output,), size_bytes)


@dataclass
class Weight(Int8Weight):
    """Keeps nothing but what it is told."""

    transpose_bytes: int
    kept: bool = False

    def __init__(self, transpose_bytes: int) -> None:
        self.transpose_bytes = transpose_bytes

    @classmethod
    def is_available(cls) -> bool:
        return True

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def tiles(self):
        raise NotImplementedError

    def keep_transpose(self, wanted: bool) -> None:
        self.kept = wanted


class Server:
    """A cache of CAPACITY tokens of one byte each, of which training may have half."""

    def __init__(self, *transpose_bytes: int, **times: float) -> None:
        self.budget = CacheBudget(CAPACITY, 1)
        self.weights = [Weight(size) for size in transpose_bytes]
        self.memory = TrainingMemory(self.budget, self.weights, **times)
        self.budget.reclaim = self.memory.reclaim

    @property
    def room(self) -> int:
        """Bytes that are free without giving up anything."""
        with self.budget._lock:
            self.budget._settle()
        return CAPACITY - self.budget._charged

    @property
    def kept(self) -> list[bool]:
        return [weight.kept for weight in self.weights]


def test_a_pass_is_kept_once():
    async def scenario() -> None:
        server = Server()
        assert server.memory.keep(KEYS[0], [recorded(200), recorded(50)])
        assert (server.room, server.memory.bytes_left, server.budget.tokens_left) == (750, 250, 1000)
        with server.memory.taken(KEYS[0]) as kept:
            assert (kept.size_bytes, kept.shape, kept.num_rows, server.room) == (250, (2, 1, 1), [1, 1], 750)
            pieces = kept.pieces
        assert (server.room, server.memory.bytes_left, len(server.memory)) == (1000, 500, 0)
        assert [piece.output for piece in pieces] == [None, None]  # whoever still holds the pass
        with pytest.raises(Forgotten), server.memory.taken(KEYS[0]):
            pass

    run(scenario())


def test_the_share_of_training_is_bounded():
    async def scenario() -> None:
        server = Server()
        assert server.memory.keep(KEYS[0], [recorded(300)])
        assert not server.memory.keep(KEYS[1], [recorded(201)])
        assert server.memory.keep(KEYS[2], [recorded(200)])
        assert (server.room, len(server.memory)) == (500, 2)
        with server.memory.taken(KEYS[0]):  # what was there first is still there
            pass

    run(scenario())


def test_sessions_get_the_room_when_they_need_it():
    async def scenario() -> None:
        server = Server(100)
        server.memory.transpose()
        for key in KEYS[:3]:
            assert server.memory.keep(key, [recorded(100)])
        lease = server.budget.lease("somebody", 750)
        assert len(server.memory) == 1 and server.kept == [True]  # the oldest went
        with server.memory.taken(KEYS[2]):
            pass
        lease.promise(1000)
        assert server.kept == [False] and server.room == 0
        with pytest.raises(PeerBusy):
            server.budget.lease("another", 1)

    run(scenario())


def test_training_takes_nothing_from_sessions_nor_from_itself():
    async def scenario() -> None:
        server = Server(100)
        lease = server.budget.lease("somebody", 850)
        assert server.memory.keep(KEYS[0], [recorded(100)])
        assert not server.memory.keep(KEYS[1], [recorded(100)])
        server.memory.transpose()
        assert server.kept == [False] and len(server.memory) == 1
        lease.close()
        server.memory.transpose()
        assert server.kept == [True]

    run(scenario())


def test_a_pass_without_a_way_back_is_dropped():
    async def scenario() -> None:
        server = Server(kept_s=0.01)
        server.memory.keep(KEYS[0], [recorded(100)])
        await until(lambda: not len(server.memory))
        assert server.room == CAPACITY

    run(scenario())


def test_transposed_weights_are_dropped_when_nobody_trains():
    async def scenario() -> None:
        server = Server(10, 20, unused_s=0.01)
        server.memory.transpose()
        assert (server.kept, server.room) == ([True, True], 970)
        await until(lambda: server.kept == [False, False])
        assert server.room == CAPACITY
        server.memory.transpose()
        assert server.kept == [True, True]

    run(scenario())


def test_as_many_weights_are_transposed_as_leave_room_for_passes():
    async def scenario() -> None:
        server = Server(200, 200, 100, 0)
        server.memory.transpose()
        assert server.kept == [True, False, True, False]  # of the half, three quarters
        assert server.memory.bytes_left == 200

    run(scenario())


def test_closed():
    async def scenario() -> None:
        server = Server(100)
        server.memory.transpose()
        server.memory.keep(KEYS[0], [recorded(100)])
        server.memory.close()
        assert (server.kept, server.room, len(server.memory)) == ([False], CAPACITY, 0)

    run(scenario())


@needs_fbgemm
def test_gradients_through_a_transposed_weight():
    """The exact product with the rounded weight, but for the 14 bits that fbgemm's inputs keep."""
    weight = FbgemmWeight(*quantize_rows(torch.randn(300, 70, generator=torch.Generator().manual_seed(0))))
    grad = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 3, 5)[:, None]
    grad[2, 7] *= 100
    exact = grad @ weight.dequantize()
    assert torch.allclose(weight.matmul_grad(grad), exact, rtol=1e-4)
    weight.keep_transpose(True)
    for _ in range(2):
        found = weight.matmul_grad(grad)
        assert ((found - exact).norm(dim=1) < 1e-3 * exact.norm(dim=1)).all()
        assert torch.equal(found[1], weight.matmul_grad(grad[1:2])[0])
    assert not torch.equal(found, exact)  # the transpose was used
    weight.keep_transpose(False)
    assert weight._transpose is None
    assert torch.allclose(weight.matmul_grad(grad), exact, rtol=1e-4)
