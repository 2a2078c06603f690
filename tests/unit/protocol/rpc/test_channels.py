"""Channels to peers that are asked for while all are closed: gRPC ends the process of who uses one that is."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import grpc
import pytest

from swarm_protocol.errors import PeerUnavailable
from swarm_protocol.net.tls import ClientCredentials
from swarm_protocol.rpc import channels
from swarm_protocol.rpc.channels import PinnedChannels, translated
from tests.worlds.identities import identity
from tests.worlds.virtual_time import run_virtually

pytestmark = pytest.mark.run_by(function=run_virtually)
FINGERPRINT = bytes(32)


class SlowChannel:
    """Takes a second to open, and one to close."""

    is_closed = False
    state = grpc.ChannelConnectivity.IDLE

    def get_state(self) -> grpc.ChannelConnectivity:
        return self.state

    async def close(self) -> None:
        self.is_closed = True
        await asyncio.sleep(1.0)


class Opened(list[SlowChannel]):
    """Those that were."""

    def __init__(self) -> None:
        super().__init__()
        self._is_one = asyncio.Event()

    async def wait_for_one(self) -> None:
        """Returns before those who asked for it have it."""
        await self._is_one.wait()

    def add(self) -> SlowChannel:
        self.append(SlowChannel())
        self._is_one.set()
        return self[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    made = Opened()

    async def connect(*_: Any) -> SlowChannel:
        await asyncio.sleep(1.0)
        return made.add()

    monkeypatch.setattr(channels, "pinned_channel", connect)
    return made


async def test_peers_that_are_asked_for_at_once_share_a_channel(opened: Opened) -> None:
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    first, second = await asyncio.gather(*(pinned.to("host:1", FINGERPRINT, "peer") for _ in range(2)))
    assert first is second is await pinned.to("host:1", FINGERPRINT, "peer") and len(opened) == 1
    assert await pinned.to("host:2", FINGERPRINT, "peer") is not first
    await pinned.close()
    assert all(channel.is_closed for channel in opened)


async def test_channels_to_peers_that_are_gone_are_not_kept(opened: Opened) -> None:
    """Nor idle ones. One that has not had its first call is not connected yet."""
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    for port in range(4):
        await pinned.to(f"host:{port}", FINGERPRINT, "peer")
    idle, failed, ready, new = opened
    idle.state = ready.state = grpc.ChannelConnectivity.READY
    assert await pinned.to("host:0", FINGERPRINT, "peer") is idle
    idle.state, failed.state = grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE
    assert await pinned.to("host:2", FINGERPRINT, "peer") is ready
    assert await pinned.to("host:3", FINGERPRINT, "peer") is new
    gone = WeakSet([idle, failed])
    opened.clear()
    del idle, failed
    gc.collect()
    assert not gone
    await pinned.to("host:0", FINGERPRINT, "peer")
    assert len(opened) == 1
    await pinned.close()


async def test_none_is_given_out_once_they_are_closed(opened: Opened) -> None:
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    await pinned.to("host:1", FINGERPRINT, "peer")
    closing = asyncio.ensure_future(pinned.close())
    await asyncio.sleep(0.5)
    for _ in range(2):  # while they are closed, and after
        for port in (1, 2):
            with pytest.raises(PeerUnavailable, match="are closed") as caught:
                await pinned.to(f"host:{port}", FINGERPRINT, "peer")
            assert caught.value.peer_id == "peer"
        await closing
    assert len(opened) == 1


async def test_nor_is_one_that_was_opened_just_before(opened: Opened) -> None:
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    asking = asyncio.ensure_future(pinned.to("host:1", FINGERPRINT, "peer"))
    await opened.wait_for_one()
    await pinned.close()
    with pytest.raises(PeerUnavailable, match="are closed"):
        await asking
    assert opened[0].is_closed


async def test_who_waits_for_one_when_all_are_closed_hears_of_it(opened: Opened) -> None:
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    asking = [asyncio.ensure_future(pinned.to("host:1", FINGERPRINT, "peer")) for _ in range(2)]
    await asyncio.sleep(0.5)
    asking[1].cancel()
    await pinned.close()
    with pytest.raises(PeerUnavailable, match="closed") as caught:
        await asking[0]
    assert caught.value.peer_id == "peer"
    await asyncio.wait(asking)
    assert asking[1].cancelled() and not opened


async def test_connections_that_fail_meanwhile_keep_no_channel_open(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    await pinned.to("host:1", FINGERPRINT, "peer")

    async def connect(*_: Any) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise OSError("the port of the tunnel is gone")

    monkeypatch.setattr(pinned, "_connect", connect)
    asking = asyncio.ensure_future(pinned.to("host:2", FINGERPRINT, "peer"))
    await asyncio.sleep(0.5)
    await pinned.close()
    with pytest.raises(OSError, match="is gone"):
        await asking
    assert opened[0].is_closed


async def test_closing_can_be_cancelled(opened: Opened) -> None:
    pinned = PinnedChannels(ClientCredentials(identity(0)))
    await pinned.to("host:1", FINGERPRINT, "peer")
    closing = asyncio.ensure_future(pinned.close())
    await asyncio.sleep(0.5)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()


async def test_a_time_limit_is_kept_while_a_call_fails() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), translated("peer"):
            try:
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                raise asyncio.InvalidStateError from None
