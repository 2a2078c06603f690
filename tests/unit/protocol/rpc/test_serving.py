"""A gRPC service on either family of addresses, as peers that train and those that hold experts have one."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.tls import Certificate, ClientCredentials, pinned_channel
from swarm_protocol.rpc import serving
from swarm_protocol.rpc.serving import start_server
from swarm_protocol.wire.constants import SERVER_OPTIONS
from tests.worlds.identities import identity


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
async def test_it_is_reached_where_it_says(host: str) -> None:
    try:
        socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    certificate = Certificate.generate()
    server, port = await start_server(lambda _: None, certificate, host, 0)
    address = host_port(host, port)
    try:
        channel = await pinned_channel(ClientCredentials(identity(0)), address, certificate.fingerprint, [])
        await channel.channel_ready()
        await channel.close()
    finally:
        await server.stop(None)


async def test_an_address_of_another_machine_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on \[2001:db8::1\]:7: the port is in use or"):
        await start_server(lambda _: None, Certificate.generate(), "2001:db8::1", 7)


async def test_connections_that_never_begin_tls_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = "grpc.server_handshake_timeout_ms"
    assert dict(SERVER_OPTIONS)[timeout] <= 15_000
    options = [(name, 20 if name == timeout else value) for name, value in SERVER_OPTIONS]
    monkeypatch.setattr(serving, "SERVER_OPTIONS", options)
    server, port = await start_server(lambda _: None, Certificate.generate(), "127.0.0.1", 0)
    try:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert await asyncio.gather(*(reader.read() for reader, _ in silent)) == [b""] * 20
        for _, writer in silent:
            writer.close()
    finally:
        await server.stop(None)
