"""Hops are opened together or not at all, each with the address for its outputs."""

from __future__ import annotations

import asyncio
import gc
import warnings

import grpc
import pytest

from swarm_client.adapters.snapshots import ActiveAdapter, AdapterSnapshot
from swarm_client.core.background import now_s
from swarm_client.routing.routing import Hop, Route
from swarm_client.sessions.opening import Opener, Opening, Terms
from swarm_client.transport.hops import Inbox
from swarm_protocol.errors import PeerBusy, PeerUnavailable
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.wire.session_keys import push_key_of
from tests.worlds.fake_servers import NUM_BLOCKS, FakeServers, client_of
from tests.worlds.servers import rpc_error
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)

ALL = Span(0, NUM_BLOCKS)
OPENING = Opening(batch_size=2, reserve_tokens=8)


def three() -> FakeServers:
    """Their order of peer ids is not that of their blocks."""
    return FakeServers(b="0:2", c="2:4", a="4:6")


def chain_of(servers: FakeServers) -> Route:
    return tuple(Hop(server, server.span) for server in servers.records.values())


def requests(servers: FakeServers) -> dict[str, pb.Open]:
    return {call.peer_id: call.request for call in servers.calls}


def test_room_is_for_all_rows() -> None:
    assert Opening(batch_size=3, reserve_tokens=8, spare_tokens=2).need_tokens == 3 * (8 + 2)
    assert Opening(batch_size=1, reserve_tokens=8, num_copies=5, copy_tokens=2).need_tokens == 8 + 5 * 2


@pytest.mark.parametrize(
    ("max_positions", "reserve_tokens", "num_tokens", "room"),
    [
        (None, 40, 10, (40, 0)),
        (None, 40, 40, (40, 0)),
        (None, 0, 10, (10, 64)),  # who does not know how long it gets asks for more
        (None, 0, 1000, (1000, 250)),
        (1100, 0, 1000, (1000, 100)),  # but never beyond the model's longest sequence
        (100, 500, 10, (100, 0)),
    ],
)
async def test_how_much_room_a_session_asks_for(
    max_positions: int | None, reserve_tokens: int, num_tokens: int, room: tuple[int, int]
) -> None:
    async with client_of(three()):
        opening = Terms(max_positions, reserve_tokens).opening(2, num_tokens, 7, 9)
        assert (opening.reserve_tokens, opening.spare_tokens) == room
        assert (opening.batch_size, opening.sent_number, opening.changed_number) == (2, 7, 9)


async def test_hops_are_as_old_as_their_session() -> None:
    async with client_of(three()):
        terms, start_s = Terms(None, 8), now_s()
        asked_s = []
        for ages in (True, True, False):
            asked_s.append(terms.opening(1, 8, ages=ages).asked_s)
            await asyncio.sleep(3.0)
        assert asked_s == [start_s, start_s, None]


async def test_each_hop_is_given_the_address_of_the_next() -> None:
    servers = three()
    async with client_of(servers) as swarm:
        hops = await Opener(swarm, Inbox()).open_span(ALL, OPENING, None)
        assert [(hop.hop.server.peer_id, str(hop.span)) for hop in hops] == [("b", "0:2"), ("c", "2:4"), ("a", "4:6")]
        keys = [hop.session_key for hop in hops]
        assert len(set(keys)) == 3 and all(len(key) >= 16 for key in keys)
        sent = requests(servers)
        assert [sent[hop.hop.server.peer_id].session_key for hop in hops] == keys
        assert [(sent[name].next.peer_id, sent[name].next.push_key) for name in "bc"] == [
            ("c", push_key_of(keys[1])),
            ("a", push_key_of(keys[2])),
        ]
        assert not any(key in sent[name].next.SerializeToString() for key in keys for name in "bc")
        assert not sent["a"].HasField("next")  # its outputs go to the client
        assert [hop.next_number for hop in hops] == [hops[1].number, hops[2].number, None]
        assert all(hop.max_step_tokens == 64 and not hop.gone for hop in hops)


@pytest.mark.parametrize(("compression", "codec"), [("none", pb.RAW), ("int8", pb.INT8_BLOCKS)])
async def test_what_a_server_is_asked_for(compression: str, codec: pb.Codec) -> None:
    servers = three()
    async with client_of(servers, compression=compression) as swarm:
        await asyncio.sleep(10.0)
        opener = Opener(swarm, Inbox())
        opener.adapter = AdapterSnapshot(ActiveAdapter(name="polite"))
        opening = Opening(2, 8, 7, 9, records_past=True, spare_tokens=3, asked_s=now_s() - 5.0)
        await opener.open_span(ALL, opening, None)
        for name, request in requests(servers).items():
            assert (request.batch_size, request.reserve_tokens, request.spare_tokens) == (2, 8, 3)
            assert (request.changed_number, request.records_past, request.codec) == (9, True, codec)
            # Those in the middle must send what the last one need not.
            assert request.sent_number == (7 if name == "a" else 0)
            assert request.adapter.name == "polite"
            assert request.age_s == pytest.approx(5.0, abs=0.1) and request.wait_s == 0.0
            blocks = servers.records[name].span
            assert request.contract.blocks == pb.Span(start=blocks.start, end=blocks.end)


@pytest.mark.parametrize(
    ("status", "error"),
    [(grpc.StatusCode.RESOURCE_EXHAUSTED, PeerBusy), (grpc.StatusCode.UNAVAILABLE, PeerUnavailable)],
)
async def test_if_one_refuses_none_is_opened(status: grpc.StatusCode, error: type[Exception]) -> None:
    servers = three()
    servers.refusals["c"] = status
    async with client_of(servers) as swarm:
        with pytest.raises(error) as caught:
            await Opener(swarm, Inbox()).open_span(ALL, OPENING, None)
        assert (caught.value.peer_id, caught.value.span) == ("c", Span(2, 4))
        assert {call.peer_id for call in servers.calls if call.closed} == {"a", "b"}


@pytest.mark.parametrize("in_turn", [False, True])
async def test_who_is_interrupted_leaves_no_session_behind(in_turn: bool) -> None:
    servers = three()
    servers.silent.add("c")
    async with client_of(servers) as swarm:
        opener = Opener(swarm, Inbox())
        opening = asyncio.ensure_future(
            opener.open_in_turn(chain_of(servers), OPENING, 100.0, [])
            if in_turn
            else opener.open_span(ALL, OPENING, None)
        )
        await asyncio.sleep(1.0)
        assert {call.peer_id for call in servers.calls if call.is_open} == {"a", "b"}
        opening.cancel()
        await asyncio.wait([opening])
        assert opening.cancelled() and all(call.cancelled for call in servers.calls)


async def test_in_turn_servers_are_asked_in_the_order_of_their_ids_once_the_one_before_has_room() -> None:
    servers = three()
    async with client_of(servers) as swarm:
        servers.fill("a", "b")
        asked: list[str] = []
        opening = asyncio.ensure_future(Opener(swarm, Inbox()).open_in_turn(chain_of(servers), OPENING, 100.0, asked))
        for name, then in (("a", ["a", "b"]), ("b", ["a", "b", "c"])):
            await asyncio.sleep(10.0)
            assert servers.asked() == asked == then[:-1]
            servers.room[name].set()
            await asyncio.sleep(0.1)
            assert servers.asked() == asked == then
        hops = await opening
        assert [hop.hop.server.peer_id for hop in hops] == ["b", "c", "a"]  # as the blocks go
        assert [hop.next_number for hop in hops] == [hops[1].number, hops[2].number, None]
        waits_s = [call.request.wait_s for call in servers.calls]
        assert waits_s == pytest.approx([100.0, 90.0, 80.0], abs=1.0)  # the time is for all of them together


async def test_in_turn_those_after_one_that_has_no_room_are_not_asked() -> None:
    servers = three()
    gc.collect()  # coroutines that other tests have left
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with client_of(servers) as swarm:
            servers.fill("b")
            asked: list[str] = []
            with pytest.raises(PeerBusy):
                await Opener(swarm, Inbox()).open_in_turn(chain_of(servers), OPENING, 5.0, asked)
            assert servers.asked() == asked == ["a", "b"]
            assert servers.calls[0].cancelled
        gc.collect()
    assert not [str(each.message) for each in warned if "was never awaited" in str(each.message)]


async def test_a_trial_that_is_given_up_leaves_no_error_that_nobody_has_read() -> None:
    """Servers are tried out while the client leaves: one has refused just then."""
    servers, unread = three(), []
    async with client_of(servers) as swarm:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unread.append(context["message"]))

        async def refuse(_name: str, _request: pb.Open) -> None:
            trying.cancel()
            raise rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")

        await swarm.chain(ALL, 8)
        servers.admit = refuse  # type: ignore[method-assign]
        trying = asyncio.ensure_future(Opener(swarm, Inbox()).try_out(ALL, (), hidden_size=4))
        with pytest.raises(asyncio.CancelledError):
            await trying
        assert servers.calls
        gc.collect()
    gc.collect()
    assert not unread


async def test_a_trial_that_a_server_refuses_leaves_no_session_behind() -> None:
    servers = FakeServers(a="0:6")
    async with client_of(servers) as swarm:
        await swarm.chain(ALL, 8)
        trying = asyncio.ensure_future(Opener(swarm, Inbox()).try_out(ALL, (), hidden_size=4))
        await asyncio.sleep(0.5)
        (call,) = servers.calls
        status = grpc.StatusCode.INVALID_ARGUMENT.value[0]
        call.say(pb.SessionReply(failure=pb.Failure(status=status, message="no", number=call.steps[0].number)))
        assert not await trying
        assert call.cancelled
