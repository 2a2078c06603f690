"""A gRPC service on either family of addresses, as peers that train and those that hold experts have one."""

from __future__ import annotations

import socket

import pytest

from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.tls import Certificate, ClientCredentials, pinned_channel
from swarm_protocol.rpc.serving import start_server
from tests.unit.identities import identity
from tests.unit.support import run


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_it_is_reached_where_it_says(host: str) -> None:
    try:
        socket.create_server((host.strip("[]"), 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def story() -> None:
        certificate = Certificate.generate()
        server, port = await start_server(lambda _: None, certificate, host, 0)
        address = host_port(host, port)
        channel = await pinned_channel(ClientCredentials(identity(0)), address, certificate.fingerprint, [])
        await channel.channel_ready()
        await channel.close()
        await server.stop(None)

    run(story())


def test_an_address_of_another_machine_is_refused_with_a_sentence() -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match=r"cannot listen on \[2001:db8::1\]:7: expected a free port"):
            await start_server(lambda _: None, Certificate.generate(), "2001:db8::1", 7)

    run(story())
