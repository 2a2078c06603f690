"""A server in a network namespace of its own, whose packets can be made to vanish; needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import Replicas

from swarm_cli.demo.local_cluster import LocalServer
from swarm_client.sessions.session import RemoteSession
from swarm_protocol.process.handle import ProcessHandle
from swarm_protocol.span import Span

_START_TIMEOUT_S = 60.0
_NOBODY = "02:00:00:00:00:01"  # packets to this Ethernet address are dropped without a word


class NoNamespaces(Exception):
    """This machine or user cannot have network namespaces."""


class SilentNetwork:
    """A namespace at the other end of a virtual cable."""

    def __init__(self, name: str, our_address: str, address: str) -> None:
        self.our_address, self.address = our_address, address
        self.name = name
        self._server: LocalServer | None = None

    def start_server(self, replicas: Replicas, span: Span, directory: Path) -> subprocess.Popen:
        """One that clients prefer to others of the same span; returns once it is ready."""
        options = {"--model": replicas.path, "--quant": replicas.quant, "--swarm": replicas.swarm, "--blocks": span}
        options |= {"--host": self.address, "--throughput": 10_000, "--log-level": "warning", "--cache-tokens": 16384}
        arguments = [str(word) for option in options.items() for word in option]
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "swarm_server", *arguments]
        stdout, stderr = directory / "stdout", directory / "stderr"
        with stdout.open("w") as out, stderr.open("w") as err:
            process = subprocess.Popen([*command, "--prefix-cache", "none"], stdout=out, stderr=err)
        self._server = LocalServer(ProcessHandle(process.pid), stdout, stderr)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.ready:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise SystemExit(f"a server in a namespace did not start: {stderr.read_text()}")
            time.sleep(0.01)
        return process

    def silence(self, session: RemoteSession) -> None:
        """From now on nothing gets through, in either direction, and nobody is told."""
        assert self._server.peer_id in [hop.server.peer_id for hop in session.hops]
        _ip("neighbour", "replace", self.address, "lladdr", _NOBODY, "nud", "permanent", "dev", f"{self.name}a")
        _ip(
            *self._inside,
            "neighbour",
            "replace",
            self.our_address,
            "lladdr",
            _NOBODY,
            "nud",
            "permanent",
            "dev",
            "inside",
        )

    def speak(self) -> None:
        """Packets get through again."""
        _ip("neighbour", "del", self.address, "dev", f"{self.name}a")
        _ip(*self._inside, "neighbour", "del", self.our_address, "dev", "inside")

    @property
    def _inside(self) -> tuple[str, ...]:
        return "-n", self.name


@contextmanager
def silent_network() -> Iterator[SilentNetwork]:
    """Raises NoNamespaces."""
    name, number = f"ch{os.getpid()}", os.getpid() % 256
    network = SilentNetwork(name, f"10.213.{number}.1", f"10.213.{number}.2")
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoNamespaces(getattr(error, "stderr", "").strip() or str(error)) from None
    try:
        try:
            _ip("link", "add", f"{name}a", "type", "veth", "peer", "name", "inside", "netns", name)
            _ip("address", "add", f"{network.our_address}/30", "dev", f"{name}a")
            _ip("link", "set", "dev", f"{name}a", "up")
            _ip("-n", name, "address", "add", f"{network.address}/30", "dev", "inside")
            for device in ("inside", "lo"):
                _ip("-n", name, "link", "set", "dev", device, "up")
        except subprocess.CalledProcessError as error:
            raise NoNamespaces(error.stderr.strip()) from None
        yield network
    finally:
        _ip("netns", "del", name)  # and the cable with it


@contextmanager
def silent_server(network: SilentNetwork, replicas: Replicas, span: Span) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        process = network.start_server(replicas, span, Path(directory))
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
