"""Homes behind routers that translate addresses, in network namespaces: nobody outside can connect to them."""

from __future__ import annotations

import subprocess

import pytest

from tests.swarm.network import Network

_SUBNET = "192.168.50"  # of every home: as in reality, the address of one is another's too


class NatNetwork(Network):
    """Public ``hosts``, and ``homes`` of one host each, which reach the public ones through a masquerading router."""

    def __init__(self, *hosts: str, homes: tuple[str, ...]) -> None:
        super().__init__(*hosts, *(f"at-{home}" for home in homes))
        self._homes = homes

    def in_namespace(self, host: str, *command: str) -> str:
        """What it prints; the host may be ``at-HOME``, the router of a home."""
        whole = ["ip", "netns", "exec", self._namespace(host), *command]
        return subprocess.run(whole, check=True, capture_output=True, text=True).stdout

    def forget_after(self, home: str, silence_s: int) -> None:
        """The router forgets connections on which nothing passes for so long, as those at home do."""
        for name, value in (("tcp_timeout_established", silence_s), ("tcp_loose", 0)):
            self.in_namespace(f"at-{home}", "sysctl", "-qw", f"net.netfilter.nf_conntrack_{name}={value}")

    def says_nothing(self, home: str) -> None:
        """The router swallows what it does not expect, as those at home do, instead of refusing it."""
        rule = "iptables -A INPUT -i eth0 -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP"
        self.in_namespace(f"at-{home}", *rule.split())

    def draws_ports(self, home: str) -> None:
        """The router gives each connection a port of its own."""
        nat = ["iptables", "-t", "nat"]
        self.in_namespace(
            f"at-{home}", *nat, "-I", "POSTROUTING", *["-o", "eth0", "-j", "MASQUERADE", "--random-fully"]
        )

    def bytes_between(self, home: str, other: str) -> int:
        """That the router of one home has got from that of the other, since it was first asked."""
        rule = ["FORWARD", "-i", "eth0", "-s", self.addresses[f"at-{other}"]]
        try:
            self.in_namespace(f"at-{home}", "iptables", "-C", *rule)
        except subprocess.CalledProcessError:
            self.in_namespace(f"at-{home}", "iptables", "-I", *rule)
        listed = self.in_namespace(f"at-{home}", *["iptables", "-vnxL", "FORWARD"])
        line = next(line for line in listed.splitlines() if self.addresses[f"at-{other}"] in line.split())
        return int(line.split()[1])

    def change_address(self, home: str, number: int) -> str:
        """As a laptop that changes networks: the host has another address, and all of its connections are lost."""
        address = f"{_SUBNET}.{number}"
        for change in (("flush", "dev", "eth0"), ("add", f"{address}/24", "dev", "eth0")):
            self.in_namespace(home, "ip", "addr", *change)
        self.in_namespace(home, "ip", "route", "replace", "default", "via", f"{_SUBNET}.1")
        return address

    def _build(self) -> None:
        super()._build()
        for home in self._homes:
            self._build_home(home)

    def _build_home(self, home: str) -> None:
        router, inside = f"at-{home}", self._namespace(home)
        subprocess.run(["ip", "netns", "add", inside], check=True, capture_output=True)
        self.addresses[home] = f"{_SUBNET}.2"
        link = ["ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", inside]
        self.in_namespace(router, *link)
        self.in_namespace(router, "ip", "addr", "add", f"{_SUBNET}.1/24", "dev", "lan")
        self.in_namespace(router, "ip", "link", "set", "lan", "up")
        self.in_namespace(home, "ip", "link", "set", "lo", "up")
        self.in_namespace(home, "ip", "link", "set", "eth0", "up")
        self.in_namespace(home, "ip", "addr", "add", f"{_SUBNET}.2/24", "dev", "eth0")
        self.in_namespace(home, "ip", "route", "add", "default", "via", f"{_SUBNET}.1")
        try:
            self.in_namespace(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            self.in_namespace(router, *["iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"])
            strangers = "iptables -A FORWARD -i eth0 -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP"
            self.in_namespace(router, *strangers.split())
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"addresses cannot be translated here, which needs iptables: {error}")
