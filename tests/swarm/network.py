"""A small network on one machine: hosts are network namespaces around a bridge, and links can be cut. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000  # setns(2)
ME = "me"  # this process is a host as well


class Network:
    """A context manager. A link that is cut swallows packets; neither end is told."""

    def __init__(self, *hosts: str) -> None:
        pid = os.getpid()
        self._tag = f"sv{pid % 100_000}"
        self._hub = f"{self._tag}-hub"
        subnet = f"10.{100 + pid % 100}.{pid // 100 % 256}"
        self.addresses = {host: f"{subnet}.{number}" for number, host in enumerate([ME, *hosts], start=1)}

    def __enter__(self) -> Network:
        try:
            _ip("netns", "add", self._hub)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here, which needs root and iproute2: {error}")
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        # At once, while what a namespace holds goes some time after it: the next network has the same name here.
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True)
        for name in [self._hub, *map(self._namespace, self.addresses)]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def run(self, host: str, function: Callable[[], T]) -> T:
        """What the function returns; processes that it starts are on that host."""
        results: list[T] = []

        def run() -> None:
            with open(self.namespace_file(host)) as namespace:
                enter(namespace.fileno())
            results.append(function())

        thread = threading.Thread(target=run)  # a namespace is a thread's
        thread.start()
        thread.join()
        return results[0]

    def namespace_file(self, host: str) -> str:
        """The path whose descriptor setns(2) takes."""
        return f"/run/netns/{self._namespace(host)}"

    def cut(self, host: str) -> None:
        self._in_hub("link", "set", f"to-{host}", "nomaster")

    def mend(self, host: str) -> None:
        self._in_hub("link", "set", f"to-{host}", "master", "bridge")

    def _build(self) -> None:
        self._in_hub("link", "add", "bridge", "type", "bridge")
        self._in_hub("link", "set", "bridge", "up")
        for host, address in self.addresses.items():
            place, name = [], self._tag
            if host != ME:
                namespace, name = self._namespace(host), "eth0"
                place = ["-n", namespace]
                _ip("netns", "add", namespace)
                _ip(*place, "link", "set", "lo", "up")
            _ip(*place, "link", "add", name, "type", "veth", "peer", "name", f"to-{host}", "netns", self._hub)
            _ip(*place, "addr", "add", f"{address}/24", "dev", name)
            _ip(*place, "link", "set", name, "up")
            self._in_hub("link", "set", f"to-{host}", "up")
            self.mend(host)

    def _namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _in_hub(self, *arguments: str) -> None:
        _ip("-n", self._hub, *arguments)


def enter(namespace: int) -> None:
    """Move this thread into the network namespace of an open file."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
