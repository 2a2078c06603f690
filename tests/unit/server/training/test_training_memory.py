"""What training keeps: within its share of the cache, given up when sessions need the room, dropped when unused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from swarm_models.kernels.int8_linear import FbgemmWeight, Int8Weight, quantize_rows
from swarm_protocol.errors import CacheMiss, PeerBusy, RequestRejected
from swarm_protocol.span import Span
from swarm_server.blocks.recording import Recorded
from swarm_server.kv.kv_cache import CacheBudget, Charge
from swarm_server.training.training_memory import TrainingMemory
from tests.unit.support import run, until

CAPACITY = 1000
BLOCKS = Span(1, 4)
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
    """A cache of CAPACITY bytes, of which training may have half."""

    def __init__(self, *transpose_bytes: int, **options: float) -> None:
        self.budget = CacheBudget(CAPACITY, 1)
        self.weights = [Weight(size) for size in transpose_bytes]
        self.prefixes: list[Charge] = []
        self.memory = TrainingMemory(self.budget, self.weights, self.evict, **options)
        self.budget.reclaim_by(lambda: self.memory.reclaim() or self.evict())

    def evict(self) -> bool:
        """Gives up what somebody else keeps."""
        if self.prefixes:
            self.prefixes.pop().release()
            return True
        return False

    def keep_prefixes(self, number: int, size_bytes: int) -> None:
        self.prefixes += [self.budget.keep(size_bytes, self, lambda: False) for _ in range(number)]

    def keep(self, key: bytes, *sizes: int) -> bool:
        """A pass in pieces of these sizes."""
        with self.memory.keeping(BLOCKS) as kept:
            for size in sizes:
                self.memory.add(kept, recorded(size))
            return self.memory.keep(key, kept)

    def take(self, key: bytes) -> None:
        with self.memory.taking(key) as take:
            take()

    @property
    def room(self) -> int:
        """Bytes that are free without giving up anything."""
        with self.budget.lock:
            self.budget._settle()
        return CAPACITY - self.budget._charged

    @property
    def transposed(self) -> list[bool]:
        return [weight.kept for weight in self.weights]


async def test_a_pass_is_kept_once():
    server = Server()
    assert server.keep(KEYS[0], 200, 50)
    assert (server.room, server.budget.tokens_left) == (750, 1000)
    sizes = server.memory.look(KEYS[0], BLOCKS)
    assert (sizes.shape, sizes.num_rows) == ((2, 1, 1), [1, 1])
    with server.memory.taking(KEYS[0]) as take:
        assert len(server.memory) == 1 and server.room == 750  # its turn has not come
        kept = take()
        assert take() is kept
        assert len(server.memory) == 0 and server.room == 750  # in use
        pieces = list(kept.pieces)
    assert server.room == CAPACITY
    assert [piece.output for piece in pieces] == [None, None]  # whoever still holds them
    with pytest.raises(CacheMiss):
        server.memory.look(KEYS[0], BLOCKS)
    with server.memory.taking(KEYS[0]) as take, pytest.raises(CacheMiss):
        take()


async def test_a_pass_is_for_its_blocks():
    server = Server()
    server.keep(KEYS[0], 10)
    with pytest.raises(RequestRejected, match="went through blocks 1:4, not 1:3"):
        server.memory.look(KEYS[0], Span(1, 3))


async def test_the_share_of_training_is_bounded():
    server = Server()
    assert server.keep(KEYS[0], 300)
    assert not server.keep(KEYS[1], 150, 51)  # all or nothing
    assert server.room == 700
    assert server.keep(KEYS[2], 200)
    assert (server.room, len(server.memory)) == (500, 2)


async def test_what_is_being_recorded_or_used_counts():
    server = Server()
    with server.memory.keeping(BLOCKS) as kept:
        assert server.memory.room(kept) == 500
        server.memory.add(kept, recorded(300))
        with server.memory.keeping(BLOCKS) as other:
            assert server.memory.room(other) == 200
            server.memory.add(other, None)  # it would have been more
            assert server.memory.room(other) == 0 and not server.memory.keep(KEYS[1], other)
        assert server.memory.keep(KEYS[0], kept)
    with server.memory.taking(KEYS[0]) as take, server.memory.keeping(BLOCKS) as kept:
        take()
        assert server.memory.room(kept) == 200
    with server.memory.keeping(BLOCKS) as kept:
        server.memory.add(kept, recorded(300))  # and then the request fails
    assert server.room == CAPACITY


async def test_sessions_get_the_room_when_they_need_it():
    server = Server(100)
    server.memory.transpose()
    server.keep_prefixes(1, 50)
    for key in KEYS[:3]:
        assert server.keep(key, 100)
    lease = server.budget.lease("somebody", 650)
    assert len(server.memory) == 2 and server.transposed == [True]  # the oldest went
    lease.promise(950)
    assert len(server.memory) == 0 and server.transposed == [False] and server.room == 0
    lease.promise(1000)
    assert server.prefixes == []
    with pytest.raises(PeerBusy):
        server.budget.lease("another", 1)


async def test_training_takes_nothing_from_sessions_nor_from_itself_but_what_others_keep():
    server = Server(100)
    lease = server.budget.lease("somebody", 850)
    server.keep_prefixes(3, 50)
    assert server.keep(KEYS[0], 90)
    assert len(server.prefixes) == 1
    assert not server.keep(KEYS[1], 100)
    server.memory.transpose()
    assert server.transposed == [False] and len(server.memory) == 1
    lease.close()
    server.memory.transpose()
    assert server.transposed == [True]


async def test_a_pass_without_a_way_back_is_dropped():
    server = Server(kept_s=0.05)
    server.keep(KEYS[0], 100)
    server.keep(KEYS[1], 100)
    await until(lambda: not len(server.memory))
    assert server.room == CAPACITY
    server.keep(KEYS[2], 100)
    await until(lambda: not len(server.memory))


async def test_transposed_weights_are_dropped_when_nobody_trains():
    server = Server(10, 20, unused_s=0.01)
    server.memory.transpose()
    assert (server.transposed, server.room) == ([True, True], 970)
    await until(lambda: server.transposed == [False, False])
    assert server.room == CAPACITY
    server.memory.transpose()
    assert server.transposed == [True, True]


async def test_passes_leave_room_for_weights():
    server = Server(200, 200, 100, 0)
    assert server.keep(KEYS[0], 200) and not server.keep(KEYS[1], 1)
    server.memory.transpose()
    assert server.transposed == [True, False, True, False]  # of the half, three quarters
    assert server.room == 500


async def test_a_pass_transposes_some_weights_at_a_time():
    server = Server(10, 20, 30, 40, at_once_bytes=30)
    found = []
    for _ in range(4):
        server.memory.transpose()
        found.append(sum(server.transposed))
    assert found == [2, 3, 4, 4]


def test_what_is_computed_after_its_client_has_gone_takes_no_room():
    budget = CacheBudget(CAPACITY, 1)
    memory = TrainingMemory(budget)
    with memory.keeping(Span(0, 2)) as kept:
        room = memory.room(kept)
    memory.add(kept, recorded(CAPACITY // 10))  # by the compute thread
    assert not kept.pieces and not memory.room(kept) and budget.bytes_left == CAPACITY
    with memory.keeping(Span(0, 2)) as other:
        assert memory.room(other) == room
        memory.add(other, recorded(CAPACITY // 10))

        async def keep() -> None:
            assert memory.keep(b"key", other)

        run(keep())
    with memory.taking(b"key") as take:
        pass
    with pytest.raises(CacheMiss):
        take()


async def test_closed():
    server = Server(100)
    server.memory.transpose()
    server.keep(KEYS[0], 100)
    with server.memory.keeping(BLOCKS) as kept:
        server.memory.add(kept, recorded(10))
        server.memory.close()
        assert not server.memory.keep(KEYS[1], kept)
    server.memory.transpose()
    assert (server.transposed, server.room, len(server.memory)) == ([False], CAPACITY, 0)


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
