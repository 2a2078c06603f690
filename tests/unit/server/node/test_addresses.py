"""Where a server listens, by default and if it is told."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from swarm_protocol.errors import NoSwarm
from swarm_server.node.addresses import claimed, free_port, listening_host

PEER_ID = "QmWuXJM1v3RHh9tF3Sy7Xrrn2zvhDQQpuBLRU7QLR5PaMd"


def peer(host: str) -> str:
    return f"/ip4/{host}/tcp/31337/p2p/{PEER_ID}"


def test_a_new_swarm_is_for_this_machine() -> None:
    assert listening_host(None, []) == "127.0.0.1"
    assert listening_host(None, [], [peer("127.0.0.1")]) == "127.0.0.1"
    assert listening_host(None, [peer("127.0.0.1")]) == "127.0.0.1"


def test_what_is_given_is_taken() -> None:
    assert listening_host("0.0.0.0", [peer("192.0.2.1")]) == "0.0.0.0"
    assert listening_host("localhost", [peer("127.0.0.1")]) == "127.0.0.1"
    assert listening_host("127.0.0.1", [peer("192.0.2.1"), peer("127.0.0.1")]) == "127.0.0.1"
    with pytest.raises(ValueError, match=r"host 'nobody\.invalid' is not known"):
        listening_host("nobody.invalid", [])


def test_the_loopback_is_refused_where_all_others_are_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"host ::1 is for this machine alone, and /ip4/192\.0\.2\.1/.* is elsewhere"):
        listening_host("::1", [peer("192.0.2.1")])


def source_address(target: str) -> str | None:
    """By which this machine sends packets there; None if it has no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 1))
        except OSError:
            return None
        return probe.getsockname()[0]


def test_the_address_that_leads_to_the_swarm_is_chosen() -> None:
    own = source_address("192.0.2.1")
    if own is None:
        pytest.skip("this machine has no way out")
    assert listening_host(None, [peer("127.0.0.1"), peer("192.0.2.1")]) == own
    assert listening_host(None, [], [peer("192.0.2.1")]) == own
    assert listening_host(None, [peer(own)]) == own


def test_no_way_to_the_swarm() -> None:
    nowhere = peer("255.255.255.255")  # a socket may not be connected to it
    assert source_address("255.255.255.255") is None
    with pytest.raises(NoSwarm, match=r"there is no route from this machine to /ip4/255\.255\.255\.255/"):
        listening_host(None, [nowhere])
    assert listening_host(None, [], [nowhere]) == "127.0.0.1"


@pytest.fixture
def shared() -> Iterator[int]:
    """A port in use by somebody who would share it, as libp2p would."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused(shared: int) -> None:
    refused = pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{shared}: the port is in use")
    with refused, claimed("127.0.0.1", shared):
        pass


def claim_any(claim: ExitStack) -> int:
    """A port that nobody else has taken between its choice and its claim."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with suppress(ValueError):
            claim.enter_context(claimed("127.0.0.1", port))
            return port


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_port_is_claimed_once_until_it_is_given_up(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if system != sys.platform == "linux":
        monkeypatch.setattr(sys, "platform", system)  # without abstract sockets
    elif system != sys.platform:
        pytest.skip("this system has no abstract sockets")
    with ExitStack() as claim:
        port = claim_any(claim)
        with pytest.raises(ValueError, match="the port is in use"), claimed("127.0.0.1", port):
            pass
        with socket.create_server(("127.0.0.1", port), reuse_port=True):  # which is what it is claimed for
            pass
    with claimed("127.0.0.1", port):
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_free_port_of_either_family(host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert 0 < free_port(host) < 65536
