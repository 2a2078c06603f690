"""Clients' adapters within a byte budget: the least recently used goes first, one in use never."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from swarm_protocol.errors import CacheMiss, PeerBusy, RequestRejected
from swarm_protocol.net.shares import Caller
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.wire.adapters import Adapter
from swarm_server.adapters.lora import PlacedAdapter
from swarm_server.adapters.shared_store import SharedStore
from swarm_server.adapters.store import AdapterStore, IncomingAdapter
from tests.unit.support import until

SIZE = 100
ANNA, BERT = Caller("anna"), Caller("bert")  # each may have three of four


def placed(key: bytes) -> PlacedAdapter:
    return PlacedAdapter.of(key, Adapter(key))


def named(key: bytes) -> pb.AdapterName:
    return pb.AdapterName(key=key)


def put(store: AdapterStore, *keys: bytes, size_bytes: int = SIZE, client: Caller = ANNA) -> None:
    for key in keys:
        with IncomingAdapter(store, client) as arriving:
            for _ in range(size_bytes // 10):
                arriving.add(bytes(10))
            arriving.keep(placed(key))


def known(store: AdapterStore, *keys: bytes) -> str:
    """Which of them it has, without using them."""
    return "".join(key.decode() for key in keys if key in store._entries)


async def test_the_least_recently_used_makes_room():
    store = AdapterStore(4 * SIZE)
    put(store, b"a", b"b", b"c")
    with store.using(named(b"a")) as found:
        assert found.key == b"a"
    put(store, b"d")
    assert (known(store, b"a", b"b", b"c", b"d"), store.used_bytes) == ("acd", 3 * SIZE)
    put(store, b"c")  # again
    put(store, b"e", b"f")
    assert (known(store, *(bytes([byte]) for byte in b"abcdef")), store.used_bytes) == ("cef", 3 * SIZE)
    with pytest.raises(CacheMiss), store.using(named(b"a")):
        pass
    store.close()
    assert (len(store), store.used_bytes) == (0, 0)


async def test_one_in_use_stays():
    store = AdapterStore(4 * SIZE)
    put(store, b"a", b"b", b"c")
    with ExitStack() as uses:
        for key in (b"a", b"b", b"b"):
            uses.enter_context(store.using(named(key)))
        put(store, b"d", b"e")
        assert known(store, b"a", b"b", b"c", b"d", b"e") == "abe"
        with pytest.raises(PeerBusy, match="no room for 10 bytes more of adapters: 300 of 400 bytes are in"):
            put(store, b"f", size_bytes=SIZE + 10)
        assert known(store, b"a", b"b", b"e") == "ab" and store.used_bytes == 2 * SIZE
        with store.using(named(b"a")):
            pass
    put(store, b"f", size_bytes=3 * SIZE)
    assert known(store, b"a", b"b", b"f") == "f"
    store.close()


async def test_what_arrives_is_counted_and_given_back():
    store = AdapterStore(4 * SIZE)
    put(store, b"a")
    with pytest.raises(ZeroDivisionError), IncomingAdapter(store, ANNA) as arriving:
        arriving.add(bytes(2 * SIZE))
        assert store.used_bytes == 3 * SIZE
        with IncomingAdapter(store, ANNA) as other, pytest.raises(PeerBusy):
            other.add(bytes(2 * SIZE))
        assert len(store) == 0 and store.used_bytes == 2 * SIZE
        raise ZeroDivisionError
    assert store.used_bytes == 0
    with (
        IncomingAdapter(store, ANNA) as arriving,
        pytest.raises(RequestRejected, match="larger than 300 bytes, the most"),
    ):
        arriving.add(bytes(3 * SIZE + 1))
    assert store.used_bytes == 0


async def test_one_client_leaves_room_for_others():
    store = AdapterStore(8 * SIZE)
    with ExitStack() as uses:
        for number in range(6):
            key = bytes([number])
            put(store, key)
            uses.enter_context(store.using(named(key)))
        with pytest.raises(PeerBusy, match="600 of 800 bytes are in use, 600 of them by this client"):
            put(store, b"more")
        put(store, b"bert", client=BERT)
    assert store.used_bytes == 7 * SIZE
    for number in range(20):  # who puts one after the other drops its own
        put(store, b"flood %d" % number)
    assert b"bert" in store._entries
    put(store, b"a", b"b", b"c", client=BERT)  # up to a fair part, at the cost of what others do not use
    assert {b"bert", b"a", b"b", b"c"} <= store._entries.keys()
    store.close()
    assert store.used_bytes == 0


async def test_one_that_nobody_uses_is_dropped():
    store = AdapterStore(4 * SIZE, unused_s=0.0)
    put(store, b"a", b"b")
    with store.using(named(b"b")):
        await until(lambda: len(store) == 1)
        await asyncio.sleep(0)
        assert known(store, b"b") == "b"
        store.close()
        assert len(store) == 0
    put(store, b"b")  # whoever used it before has nothing to do with it
    await until(lambda: len(store) == 0)
    assert store.used_bytes == 0


async def test_an_entry_that_grows_or_shrinks_counts_as_large_as_it_is():
    store = SharedStore(4 * SIZE)
    store.take(SIZE, ANNA)
    store.put(b"a", "value", SIZE, ANNA)
    store.resize(b"a", 2 * SIZE)
    assert store.used_bytes == 3 * SIZE
    with store.in_use(b"a"), pytest.raises(PeerBusy, match="300 of 400 bytes are in use, 0 of them by this client"):
        store.take(2 * SIZE, BERT)
    store.resize(b"a", -SIZE)
    assert store.used_bytes == 2 * SIZE
    store.drop(b"a")
    assert store.used_bytes == 0


async def test_names():
    store = AdapterStore(named={"poet": placed(b"p")})
    with store.using(pb.AdapterName(name="poet")) as found:
        assert found.key == b"p"
    with (
        pytest.raises(RequestRejected, match="has loaded no adapter 'cook': expected one of its own, poet"),
        store.using(pb.AdapterName(name="cook")),
    ):
        pass
    with pytest.raises(CacheMiss), store.using(named(b"p")):
        pass
    with pytest.raises(RequestRejected, match="neither key nor name"), store.using(pb.AdapterName()):
        pass
