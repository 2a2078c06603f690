"""Pending, committed, added up: each micro-batch once, in any order, within limits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction

import grpc
import pytest
import torch
from torch import Tensor, nn

from swarm_protocol.errors import PeerBusy, PeerMoved, RequestRejected
from swarm_protocol.wire.status import status_of
from swarm_training.stages.engine import accumulator as accumulating
from swarm_training.stages.engine.accumulator import Accumulator, rounded

M, PLENTY = 11, 1 << 20


@dataclass
class Two:
    """Two parameters."""

    parameters: list[nn.Parameter]


STAGE = Two([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))])
SIZE = 4 * 10  # bytes of one micro-batch


def gradients(m: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(m)
    exponents = torch.randint(-30, 5, (10,), generator=generator)
    flat = torch.randn(10, generator=generator) * torch.exp2(exponents) * scale
    return [flat[:6].view(2, 3), flat[6:]]


def accumulator(dtype: torch.dtype = torch.float64, max_pending_bytes: int = PLENTY) -> Accumulator:
    sums = Accumulator(STAGE, M, dtype, max_pending_bytes)
    sums.clear(3)
    return sums


def test_a_commit_that_fails_half_way_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = accumulator()
    sums.add(3, 0, "trainer", gradients(0))
    assert sums.commit(3, 0, "trainer")
    before = sums.sums.clone()
    sums.add(3, 1, "trainer", gradients(1))
    calls = iter([rounded, no_memory, rounded])
    with monkeypatch.context() as patch:
        patch.setattr(accumulating, "rounded", lambda flat: next(calls)(flat))
        with pytest.raises(MemoryError):
            sums.commit(3, 1, "trainer")
    assert torch.equal(sums.sums, before) and list(sums._done) == [0]
    assert sums.commit(3, 1, "trainer")  # tried again
    assert torch.equal(sums.sums, before + rounded(torch.cat([each.flatten() for each in gradients(1)]).double()))


def no_memory(_flat: Tensor) -> Tensor:
    raise MemoryError


def test_sums_are_exact_in_any_order_and_division_among_peers() -> None:
    exact = [Fraction(0)] * 10
    for m in range(M):
        for number, value in enumerate(torch.cat([each.flatten() for each in gradients(m)]).tolist()):
            exact[number] += Fraction(round(Fraction(value) * 2**40), 2**40)  # ties to even, as IEEE rounds
    expected = torch.tensor([float(value) for value in exact], dtype=torch.float64)
    assert all(Fraction(value) == truth for value, truth in zip(expected.tolist(), exact, strict=True))
    rng = random.Random(0)
    for _ in range(20):
        peers = [accumulator() for _ in range(3)]
        for m in rng.sample(range(M), M):
            peer = rng.choice(peers)
            peer.add(3, m, "trainer", gradients(m))
            assert peer.commit(3, m, "trainer")
        rng.shuffle(peers)
        assert torch.equal(peers[0].sums + peers[1].sums + peers[2].sums, expected)
        assert sorted(m for peer in peers for m in peer._done) == list(range(M))


def test_rounding_is_to_the_grid() -> None:
    values = torch.tensor([0.0, 2.0**-40, 1.5 * 2**-40, 2.5 * 2**-40, 2.0**-42, -(2.0**-40), 3.25, 2.0**12 + 2**-11])
    assert (rounded(values) * 2**40).tolist() == [0, 1, 2, 2, 0, -1, 3.25 * 2**40, (2**12 + 2**-11) * 2**40]
    assert rounded(torch.tensor([float("nan")])).isnan().all()


def test_sums_in_float32_are_plain_sums() -> None:
    peer = accumulator(torch.float32)
    for m in (4, 2):
        peer.add(3, m, "trainer", gradients(m))
        peer.commit(3, m, "trainer")
    expected = torch.cat([each.flatten() for each in gradients(4)]) + torch.cat([e.flatten() for e in gradients(2)])
    assert peer.sums.dtype == torch.float32 and torch.equal(peer.sums, expected)


def test_what_is_not_committed_does_not_count() -> None:
    peer = accumulator()
    peer.add(3, 1, "trainer", gradients(1))
    assert peer._done == set() and not peer.sums.any()
    assert peer._pending_bytes == SIZE
    assert not peer.commit(3, 1, "another")  # whose gradients are not here
    assert not peer.commit(3, 2, "trainer")
    assert peer._done == set() and peer._pending_bytes == SIZE


def test_the_last_gradients_of_a_trainer_replace_those_before() -> None:
    peer, other = accumulator(), accumulator()
    peer.add(3, 1, "one", gradients(1, scale=7.0))
    for each in (peer, other):
        each.add(3, 1, "one", gradients(1))
        assert each.commit(3, 1, "one") and each._pending_bytes == 0
    assert torch.equal(peer.sums, other.sums)


def test_pending_gradients_are_limited() -> None:
    peer = accumulator(max_pending_bytes=2 * SIZE)
    for m in (0, 1):
        peer.add(3, m, "one", gradients(m))
    with pytest.raises(PeerBusy, match="2 micro-batches of step 3 wait here for their commit") as refused:
        peer.add(3, 2, "two", gradients(2))
    assert status_of(refused.value) == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(PeerBusy, match="2 micro-batches of step 3 wait here"):
        peer.require_room(2, "two")  # before it is computed
    peer.require_room(1, "one")
    peer.add(3, 1, "one", gradients(1))  # in place of what it gave before
    assert peer.commit(3, 0, "one")
    peer.add(3, 2, "two", gradients(2))
    peer.forget("one")
    assert peer._pending_bytes == SIZE and not peer.commit(3, 1, "one") and peer.commit(3, 2, "two")
    narrow = [each.bfloat16() for each in gradients(5)]
    peer.add(3, 5, "one", narrow)
    assert peer._pending_bytes == SIZE // 2  # as they came
    peer.drop(5)
    assert peer._pending_bytes == 0 and not peer.waiting


def test_wrong_steps_and_numbers_are_refused() -> None:
    peer = accumulator()
    peer.add(3, 1, "trainer", gradients(1))
    for step in (2, 4):
        with pytest.raises(PeerMoved, match=f"of step {step}: this peer is at step 3") as refused:
            peer.add(step, 1, "trainer", gradients(1))
        assert status_of(refused.value) == grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(PeerMoved):
            peer.commit(step, 1, "trainer")
    for m in (-1, M):
        with pytest.raises(RequestRejected, match=f"no micro-batch {m}: expected 0 to 10"):
            peer.add(3, m, "trainer", gradients(0))
        with pytest.raises(RequestRejected):
            peer.commit(3, m, "trainer")
    assert peer._done == set() and not peer.sums.any()


def test_discarded_sums_are_counted_again() -> None:
    """Pending gradients stay: they are in nobody's sums."""
    peer = accumulator()
    for m in (0, 1):
        peer.add(3, m, "trainer", gradients(m))
    peer.commit(3, 0, "trainer")
    peer.discard()
    assert peer.step == 3 and peer._done == set() and not peer.sums.any()
    assert peer.commit(3, 1, "trainer") and peer._done == {1}
    assert not peer.commit(3, 0, "trainer")


def test_another_step_begins_with_nothing() -> None:
    peer = accumulator()
    for m in (0, 1):
        peer.add(3, m, "trainer", gradients(m))
    peer.commit(3, 0, "trainer")
    before = peer.sums
    peer.clear(4)
    assert peer.step == 4 and peer._done == set() and not peer.sums.any() and peer._pending_bytes == 0
    assert not peer.commit(4, 1, "trainer")
    assert before.any()  # a copy
