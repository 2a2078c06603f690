"""A lab of hosts on one machine: each is a network namespace, with a link of its own to a router between them.

    with NetworkLab({"client": Link(delay_ms=25, mbit=100), "server": Link(delay_ms=25, mbit=100)}) as lab:
        subprocess.Popen([*lab.on("server"), "python", "-m", "swarm_server", "--host", lab.addresses["server"], …])

What goes from one host to another passes two links, so delays add up: above, 50 ms one way and 100 ms there and back.
Needs root, iproute2, /dev/net/tun and a C compiler; ``NoLab`` says what is missing. All is gone afterwards; what a lab
left behind whose process was killed is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_SOURCE = Path(__file__).with_name("link_emulator.c")
_CLONE_NEWNET = 0x40000000  # setns(2)
PREFIX = "lab"  # of namespaces; then the process id, the number of the lab, and the host
_ROUTER = "router"
_DEVICE = "eth0"
_counter = itertools.count()


class NoLab(Exception):
    """This machine or user cannot have a lab; the text says why."""


@dataclass(frozen=True)
class Link:
    """Between a host and the router, the same in both directions unless ``up_mbit`` says otherwise.

    Attributes:
        mbit: rate, and towards the router too without ``up_mbit``; 0: unlimited.
        queue_ms: how long a packet may wait for those before it; it is dropped if that would be longer.
        is_cut: packets are swallowed, and neither end is told.
    """

    delay_ms: float = 0.0
    mbit: float = 0.0
    loss_percent: float = 0.0
    queue_ms: float = 200.0
    up_mbit: float | None = None
    is_cut: bool = False

    def line(self, number: int, end: int) -> str:
        """What the emulator reads; end 0 is the host's, so packets towards the router enter there."""
        mbit = self.mbit if end == 1 or self.up_mbit is None else self.up_mbit
        lost = 1_000_000 if self.is_cut else round(self.loss_percent * 10_000)
        return f"{number} {end} {round(self.delay_ms * 1000)} {round(mbit * 1e6)} {lost} {round(self.queue_ms * 1000)}"


def half(path: Link) -> Link:
    """For both hosts of a path that is to have this delay and loss in all."""
    kept = 1 - path.loss_percent / 100
    return replace(path, delay_ms=path.delay_ms / 2, loss_percent=100 * (1 - kept**0.5))


class NetworkLab:
    """A context manager. ``addresses`` and ``addresses_v6``: of hosts, by name. ``router``: its namespace."""

    def __init__(self, links: Mapping[str, Link], mtu: int = 1500, settings: Sequence[str] = ()) -> None:
        """``settings``: of each host's network, as ``sysctl`` takes them."""
        self._links, self._settings = dict(links), settings
        self._mtu = mtu
        self._numbers = {host: number for number, host in enumerate(links)}
        self._tag = f"{PREFIX}{os.getpid()}-{next(_counter)}"
        self.router = f"{self._tag}-{_ROUTER}"
        # Namespaces share nothing, so several labs may use the same addresses.
        self.addresses = {host: f"10.77.{number}.2" for host, number in self._numbers.items()}
        self.addresses_v6 = {host: f"fd77:{number:x}::2" for host, number in self._numbers.items()}
        self._cleanup = contextlib.ExitStack()
        self._emulator: subprocess.Popen[str] | None = None

    def __enter__(self) -> NetworkLab:
        require_lab()
        _remove_leftovers()
        with contextlib.ExitStack() as cleanup:
            for name in (self.router, *map(self.namespace, self._links)):
                _run("ip", "netns", "add", name)
                cleanup.callback(_remove, name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for setting in ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"):
                _run("ip", "netns", "exec", self.router, "sysctl", "-qw", setting)
            for host, setting in itertools.product(self._links, self._settings):
                _run(*self.on(host), "sysctl", "-qw", setting)
            self._emulator = cleanup.enter_context(self._start_emulator())
            for host, link in self._links.items():
                self._connect(host)
                self.set_link(host, link)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._cleanup.close()

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def on(self, host: str) -> list[str]:
        """The words before a command that is to run on the host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def run(self, host: str, function: Callable[[], T]) -> T:
        """What the function returns or raises, called in a thread on that host; processes that it starts are there."""

        def call() -> T:
            with open(f"/run/netns/{self.namespace(host)}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return function()

        with ThreadPoolExecutor(1) as executor:  # a namespace is a thread's
            return executor.submit(call).result()

    def link(self, host: str) -> Link:
        return self._links[host]

    def set_link(self, host: str, link: Link) -> None:
        """From now on; returns when it is so. Packets that are under way keep their delay."""
        assert self._emulator is not None and self._emulator.stdin is not None and self._emulator.stdout is not None
        for end in (0, 1):
            self._emulator.stdin.write(link.line(self._numbers[host], end) + "\n")
            self._emulator.stdin.flush()
            if self._emulator.stdout.readline() != "set\n":
                raise NoLab("the emulator of links has ended")
        self._links[host] = link

    def cut(self, host: str) -> None:
        self.set_link(host, replace(self._links[host], is_cut=True))

    def mend(self, host: str) -> None:
        self.set_link(host, replace(self._links[host], is_cut=False))

    @contextlib.contextmanager
    def _start_emulator(self):
        with tempfile.TemporaryDirectory() as directory:
            program = f"{directory}/link_emulator"
            _run(_compiler(), "-O2", "-o", program, str(_SOURCE))
            ends = [
                word
                for host, number in self._numbers.items()
                for word in (self.namespace(host), _DEVICE, self.router, f"to{number}")
            ]
            with subprocess.Popen(
                [program, *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as emulator:
                try:
                    if emulator.stdout.readline() != "ready\n":
                        raise NoLab("the emulator of links did not start: it needs /dev/net/tun")
                    yield emulator
                finally:
                    emulator.kill()

    def _connect(self, host: str) -> None:
        number = self._numbers[host]
        places = ((self.router, f"to{number}", 1), (self.namespace(host), _DEVICE, 2))
        for namespace, device, end in places:
            _run("ip", "-n", namespace, "address", "add", f"10.77.{number}.{end}/24", "dev", device)
            _run("ip", "-n", namespace, "address", "add", f"fd77:{number:x}::{end}/64", "dev", device, "nodad")
            _run("ip", "-n", namespace, "link", "set", device, "up", "mtu", str(self._mtu))
        _run("ip", "-n", self.namespace(host), "route", "add", "default", "via", f"10.77.{number}.1")
        _run("ip", "-n", self.namespace(host), "-6", "route", "add", "default", "via", f"fd77:{number:x}::1")


def require_lab() -> None:
    """Raises NoLab with what is missing here."""
    if os.geteuid() != 0:
        raise NoLab("network namespaces need root")
    if not shutil.which("ip"):
        raise NoLab("network namespaces need `ip`, of iproute2")
    if not os.path.exists("/dev/net/tun"):
        raise NoLab("links need /dev/net/tun")
    _compiler()


def _compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise NoLab("links need a C compiler, to build benchmarks/link_emulator.c")
    return found


def _remove(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _remove_leftovers() -> None:
    """Of labs whose process is gone."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"({PREFIX}(\d+)-\d+-\S+)", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            _remove(found[1])


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()
        raise NoLab(f"{' '.join(command[:4])}: {why}") from None
