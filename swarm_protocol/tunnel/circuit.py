"""The address of a server behind a relay, in libp2p's circuit notation, used in place of HOST:PORT."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.dht.addresses import tcp_target

_CIRCUIT = "/p2p-circuit/p2p/"


@dataclass(frozen=True)
class Circuit:
    """A path to a server: ``relay``, the relay's multiaddr with peer id, and ``target``, the server's peer id."""

    relay: str
    target: str

    @property
    def relay_id(self) -> str:
        return self.relay.rpartition("/p2p/")[2]

    @property
    def is_direct(self) -> bool:
        """Return whether the server accepts tunnels at its own libp2p port, though its gRPC port is unreachable."""
        return self.relay_id == self.target

    def __str__(self) -> str:
        return f"{self.relay}{_CIRCUIT}{self.target}"

    @classmethod
    def parse(cls, address: str) -> Circuit:
        """Parse an address; raise ValueError if it is no circuit, because addresses come from untrusted peers."""
        relay, mark, target = address.partition(_CIRCUIT)
        if not mark or tcp_target(relay) is None:
            raise ValueError(f"{address!r} is no circuit: expected MULTIADDR{_CIRCUIT}PEER_ID")
        tcp_target(f"{relay.rpartition('/p2p/')[0]}/p2p/{target}")
        return cls(relay, target)


def is_circuit(address: str) -> bool:
    return address.startswith("/")


def relay_of(address: str) -> str:
    """Return the peer id of the relay in the address; empty if there is none."""
    if not is_circuit(address):
        return ""
    try:
        circuit = Circuit.parse(address)
    except ValueError:
        return ""
    return "" if circuit.is_direct else circuit.relay_id
