"""The lab that benchmarks and tests of the network use: its links have the delay, rate and loss that they should."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from network_lab import PREFIX, Link, NetworkLab, NoLab, half, require_lab


@pytest.fixture(scope="module")
def lab() -> Iterator[NetworkLab]:
    try:
        require_lab()
    except NoLab as error:
        pytest.skip(str(error))
    with NetworkLab({"left": Link(), "right": Link()}) as lab:
        yield lab


@contextlib.contextmanager
def echo_server(lab: NetworkLab, host: str) -> Iterator[int]:
    """Sends every datagram back; its port."""

    def bound() -> socket.socket:
        end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        end.bind((lab.addresses[host], 0))
        return end

    def serve() -> None:
        while data := end.recvfrom(4096):
            if data[0] == b"end":
                return
            end.sendto(*data)

    with lab.run(host, bound) as end:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield end.getsockname()[1]
        finally:
            end.sendto(b"end", end.getsockname())
            thread.join()


def answers(lab: NetworkLab, datagrams: int, size: int = 64, wait_s: float = 0.5) -> list[float]:
    """When the answers came, in seconds after all were sent at once."""
    came: list[float] = []
    socket_of_left = lab.run("left", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with echo_server(lab, "right") as port, socket_of_left as end, contextlib.suppress(TimeoutError):
        end.settimeout(wait_s)
        start = time.perf_counter()
        for number in range(datagrams):
            end.sendto(number.to_bytes(2) * (size // 2), (lab.addresses["right"], port))
        while len(came) < datagrams:
            end.recv(4096)
            came.append(time.perf_counter() - start)
    return came


def test_a_path_has_its_delay_there_and_back(lab: NetworkLab) -> None:
    for host in ("left", "right"):
        lab.set_link(host, half(Link(delay_ms=40)))
    assert answers(lab, 1)[0] >= 0.080


def test_a_path_loses_what_it_should(lab: NetworkLab) -> None:
    lab.set_link("right", Link())
    lab.set_link("left", Link(loss_percent=30))
    assert 0.3 < len(answers(lab, 400)) / 400 < 0.7  # 0.49 there and back
    lab.cut("left")
    assert answers(lab, 3) == []
    lab.mend("left")
    assert lab.link("left") == Link(loss_percent=30)
    lab.set_link("left", Link())
    assert len(answers(lab, 3)) == 3


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def own_namespaces() -> set[str]:
    """Of this process's labs; other tests make namespaces meanwhile."""
    return {name for name in namespaces() if name.startswith(f"{PREFIX}{os.getpid()}-")}


def test_a_lab_leaves_nothing_even_if_it_fails(lab: NetworkLab) -> None:
    """A process that is killed in its lab leaves namespaces, which the next lab removes."""
    imports = "import os, sys; sys.path.insert(0, 'benchmarks'); from network_lab import *\n"
    killed = "lab = NetworkLab({'a': Link()}).__enter__(); print(lab.router, flush=True); os.kill(os.getpid(), 9)"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", imports + killed]
    router = subprocess.run(command, capture_output=True, text=True, cwd=root).stdout.strip()
    assert router and router != lab.router
    before = own_namespaces()
    failing = NetworkLab({"a": Link()})
    with pytest.raises(ZeroDivisionError), failing:
        assert failing.router in namespaces() and failing.router != lab.router
        raise ZeroDivisionError
    assert router not in namespaces() and failing.router not in namespaces()
    assert lab.router in own_namespaces() == before
