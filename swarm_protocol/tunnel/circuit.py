"""How the way to a server through a relay is written: as libp2p writes circuits, in place of HOST:PORT."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_protocol.dht.addresses import tcp_target

_CIRCUIT = "/p2p-circuit/p2p/"


@dataclass(frozen=True)
class Circuit:
    """``relay``: its multiaddr, with peer id. ``target``: the peer id of the server."""

    relay: str
    target: str

    @property
    def relay_id(self) -> str:
        return self.relay.rpartition("/p2p/")[2]

    @property
    def is_direct(self) -> bool:
        """The server itself takes tunnels at its libp2p port, though its gRPC port cannot be reached."""
        return self.relay_id == self.target

    def __str__(self) -> str:
        return f"{self.relay}{_CIRCUIT}{self.target}"

    @classmethod
    def parse(cls, address: str) -> Circuit:
        """Raises ValueError: strangers write addresses."""
        relay, mark, target = address.partition(_CIRCUIT)
        if not mark or tcp_target(relay) is None:
            raise ValueError(f"{address!r} is no circuit: expected MULTIADDR{_CIRCUIT}PEER_ID")
        tcp_target(f"{relay.rpartition('/p2p/')[0]}/p2p/{target}")
        return cls(relay, target)


def is_circuit(address: str) -> bool:
    return address.startswith("/")


def relay_of(address: str) -> str:
    """The peer id of the relay on the way; empty if there is none."""
    if not is_circuit(address):
        return ""
    try:
        circuit = Circuit.parse(address)
    except ValueError:
        return ""
    return "" if circuit.is_direct else circuit.relay_id
