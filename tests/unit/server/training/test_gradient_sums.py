"""Sums of gradients in the room of adapters: added in the order of numbers, counted, dropped if nobody takes them."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from swarm_protocol.errors import CacheMiss
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_server.adapters.shared_store import SharedStore
from swarm_server.training.gradient_sums import GradientSums
from tests.unit.support import until

ANNA, BERT = Caller("anna"), Caller("bert")
BLOCKS, KEY, OTHER = Span(2, 5), bytes(16), bytes(range(16))
# so that the order of additions shows in the result: 1 is lost beside 2 ** 24 unless it meets the other 1 first
VALUES = (1.0, 1.0, 2.0**24, -(2.0**24))
SIZE = 2 * 3 * 4


def grads(value: float) -> list[torch.Tensor]:
    return [torch.full((1, 3), value), torch.full((3, 1), -value)]


def add(sums: GradientSums, number: int, key: bytes = KEY, client: Caller = ANNA) -> bool:
    return sums.add(pb.Summand(key=key, number=number), BLOCKS, grads(VALUES[number]), client)


def take(sums: GradientSums, *numbers: int, key: bytes = KEY, client: Caller = ANNA) -> list[torch.Tensor]:
    return sums.take(pb.TakeSum(key=key, numbers=numbers), BLOCKS, client)


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
async def test_whichever_comes_first(order):
    store = SharedStore(100 * SIZE)
    sums = GradientSums(store)
    for number in order:
        assert add(sums, number)
    assert store.used_bytes == SIZE  # all are in one
    first, second = take(sums, 0, 1, 2, 3)
    assert (first == 2.0).all() and (second == -2.0).all()
    assert (len(store), store.used_bytes) == (0, 0)


async def test_those_ahead_of_others_take_room_of_their_own():
    store = SharedStore(100 * SIZE)
    sums = GradientSums(store)
    used = []
    for number in (1, 3, 3, 0, 1):
        add(sums, number)
        used.append(store.used_bytes // SIZE)
    assert used == [1, 2, 2, 2, 2]
    assert float(take(sums, 0, 1, 3)[0][0, 0]) == 2.0 - 2.0**24
    assert store.used_bytes == 0


async def test_clients_have_sums_of_their_own():
    sums = GradientSums(SharedStore(100 * SIZE))
    add(sums, 0)
    add(sums, 2, client=BERT)
    add(sums, 1, key=OTHER)
    assert float(take(sums, 0)[0][0, 0]) == VALUES[0]
    assert float(take(sums, 2, client=BERT)[0][0, 0]) == VALUES[2]
    with pytest.raises(CacheMiss):
        take(sums, 1, client=BERT, key=OTHER)
    assert float(take(sums, 1, key=OTHER)[0][0, 0]) == VALUES[1]


async def test_a_sum_leaves_most_of_a_share_to_adapters():
    too_small = SharedStore(5 * SIZE)  # of which a client has three quarters, and a sum a quarter of that
    assert not add(GradientSums(too_small), 0)
    assert (len(too_small), too_small.used_bytes) == (0, 0)
    assert add(GradientSums(SharedStore(6 * SIZE)), 0)


async def test_the_oldest_sum_makes_room_for_others():
    store = SharedStore(16 * SIZE)
    sums, keys = GradientSums(store), [bytes([number]) * 16 for number in range(9)]
    for key in keys:
        add(sums, 0, key)
    store.take(6 * SIZE, BERT)
    with pytest.raises(CacheMiss):
        take(sums, 0, key=keys[0])
    assert [float(take(sums, 0, key=key)[0][0, 0]) for key in keys[1:]] == [VALUES[0]] * 8
    assert store.used_bytes == 6 * SIZE


async def test_a_sum_is_not_made_where_others_use_the_room():
    store = SharedStore(8 * SIZE)
    store.take(6 * SIZE, BERT)
    store.take(SIZE, ANNA)
    assert not add(GradientSums(store), 0)
    assert (len(store), store.used_bytes) == (0, 7 * SIZE)


async def test_a_sum_that_nobody_takes_is_dropped():
    store = SharedStore(100 * SIZE, unused_s=0.0)
    add(GradientSums(store), 0)
    await until(lambda: not len(store))
    assert store.used_bytes == 0
