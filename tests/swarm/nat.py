"""Homes behind routers, in network namespaces: nobody outside can connect to them."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.swarm.network import ME, Network

_SUBNET = "192.168.50"  # of every home: as in reality, the address of one is another's too


class NatNetwork(Network):
    """Public ``hosts``, and ``homes`` of one host each, which reach the public ones through a masquerading router."""

    _tables = "iptables"

    def __init__(self, *hosts: str, homes: tuple[str, ...]) -> None:
        super().__init__(*hosts, *(f"at-{home}" for home in homes))
        self._homes = homes

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        for home in self._homes:  # one that was not finished has no address
            subprocess.run(["ip", "netns", "del", self._namespace(home)], capture_output=True)

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
        rule = ["FORWARD", "-i", "eth0", "-s", self._source(other)]
        try:
            self.in_namespace(f"at-{home}", self._tables, "-C", *rule)
        except subprocess.CalledProcessError:
            self.in_namespace(f"at-{home}", self._tables, "-I", *rule)
        listed = self.in_namespace(f"at-{home}", *[self._tables, "-vnxL", "FORWARD"])
        line = next(line for line in listed.splitlines() if self._source(other) in line.replace("/128", "").split())
        return int(line.split()[1])

    def _source(self, home: str) -> str:
        """Where packets of a home come from, as others see it."""
        return self.addresses[f"at-{home}"]

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
        link = ["ip", "link", "add", "lan", "type", "veth", "peer", "name", "eth0", "netns", inside]
        self.in_namespace(router, *link)
        for host, device in ((router, "lan"), (home, "lo"), (home, "eth0")):
            self.in_namespace(host, "ip", "link", "set", device, "up")
        try:
            strangers = f"{self._tables} -A FORWARD -i eth0 -m conntrack ! --ctstate ESTABLISHED,RELATED -j DROP"
            self.in_namespace(router, *strangers.split())
            self._give_addresses(home)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"there are no routers as those at home here, which needs iptables: {error}")

    def _give_addresses(self, home: str) -> None:
        router = f"at-{home}"
        self.addresses[home] = f"{_SUBNET}.2"
        self.in_namespace(router, "ip", "addr", "add", f"{_SUBNET}.1/24", "dev", "lan")
        self.in_namespace(home, "ip", "addr", "add", f"{_SUBNET}.2/24", "dev", "eth0")
        self.in_namespace(home, "ip", "route", "add", "default", "via", f"{_SUBNET}.1")
        self.in_namespace(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.in_namespace(router, *["iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE"])


class FirewalledNetwork(NatNetwork):
    """IPv6 alone: homes have addresses of their own, and routers let in nothing but answers, as those at home do."""

    _tables = "ip6tables"

    def _source(self, home: str) -> str:
        return self.addresses[home]

    def _build(self) -> None:
        Network._build(self)
        for number, host in enumerate(self.addresses, start=1):
            self.addresses[host] = f"{self._prefix}::{number:x}"
            self._add_address(host, self._tag if host == ME else "eth0", f"{self.addresses[host]}/64")
        for home in self._homes:
            self._build_home(home)

    def _give_addresses(self, home: str) -> None:
        router, network = f"at-{home}", f"{self._prefix}:{self._homes.index(home) + 1:x}"
        self.addresses[home] = f"{network}::2"
        self._add_address(router, "lan", f"{network}::1/64")
        self._add_address(home, "eth0", f"{network}::2/64")
        self._ip6(home, "route", "add", "default", "via", f"{network}::1")
        self.in_namespace(router, "sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
        for host in self.addresses.keys() - {router, *self._homes}:
            self._ip6(host, "route", "add", f"{network}::/64", "via", self.addresses[router])

    @property
    def _prefix(self) -> str:
        return f"fd00:{os.getpid() % 0x10000:x}"

    def _add_address(self, host: str, device: str, address: str) -> None:
        self._ip6(host, "addr", "add", address, "dev", device, "nodad")

    def _ip6(self, host: str, *arguments: str) -> None:
        where = [] if host == ME else ["-n", self._namespace(host)]
        subprocess.run(["ip", "-6", *where, *arguments], check=True, capture_output=True)
