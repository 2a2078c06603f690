"""A link of so many Mbit/s to a peer in a network namespace of its own, and how long micro-batches take over it.

Needs root and iproute2. The link is a virtual cable with a token bucket at both ends; it ends with this process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch
from square_cube_stage import BACKWARD, COMPUTED_S, FORWARD, KIND, METHOD, OPTIONS, Shape, packed, unpacked
from torch import Tensor

_PORT = 4400
_BURST_BYTES, _QUEUE_MS = 6000, 200  # small messages must not pass at once


class NoNamespaces(Exception):
    """This machine or user cannot have network namespaces, or limit their links."""


class Link:
    def __init__(self, name: str, address: str) -> None:
        self._name, self._address = name, address
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._pass = self._channel.unary_unary(METHOD)

    def set_rate(self, mbit: float) -> None:
        """In both directions."""
        bucket = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
        _run("tc", "qdisc", "replace", "dev", f"{self._name}a", *bucket)
        _run("tc", "-n", self._name, "qdisc", "replace", "dev", "inside", *bucket)

    def close(self) -> None:
        self._channel.close()

    def wire_share(self, shape: Shape, codec: str, inputs: Tensor, rounds: int) -> tuple[float, float, float]:
        """Of micro-batches one by one: the share of time in which the peer does not compute, and the seconds that a
        token takes, of which it computes; medians."""
        self._micro_batch(shape, codec, inputs)  # the peer makes the stage, connections grow warm
        measured = [self._micro_batch(shape, codec, inputs) for _ in range(rounds)]
        taken_s, computed_s = (statistics.median(values) for values in zip(*measured, strict=True))
        num_tokens = inputs.shape[0] * inputs.shape[1]
        share = statistics.median(1 - computed / taken for taken, computed in measured)
        return share, taken_s / num_tokens, computed_s / num_tokens

    def _micro_batch(self, shape: Shape, codec: str, inputs: Tensor) -> tuple[float, float]:
        start = time.perf_counter()
        output, forward_s = self._ask(FORWARD, shape, codec, inputs)
        assert output.shape == inputs.shape
        grad, backward_s = self._ask(BACKWARD, shape, codec, torch.cat([inputs, output]))
        assert grad.shape == inputs.shape
        return time.perf_counter() - start, forward_s + backward_s

    def _ask(self, kind: str, shape: Shape, codec: str, tensor: Tensor) -> tuple[Tensor, float]:
        metadata = ((KIND, kind), ("stage", str(shape)), ("codec", codec))
        data, call = self._pass.with_call(packed(tensor, codec), metadata=metadata, timeout=300.0)
        (computed_s,) = [float(value) for key, value in call.trailing_metadata() if key == COMPUTED_S]
        return unpacked(data), computed_s


@contextmanager
def link() -> Iterator[Link]:
    """To a peer that is ready. Raises NoNamespaces."""
    name, number = f"sq{os.getpid()}", os.getpid() % 256
    ours, theirs = f"10.214.{number}.1", f"10.214.{number}.2"
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", "inside", "netns", name)
        _run("ip", "address", "add", f"{ours}/30", "dev", f"{name}a")
        _run("ip", "link", "set", "dev", f"{name}a", "up")
        _run("ip", "-n", name, "address", "add", f"{theirs}/30", "dev", "inside")
        _run("ip", "-n", name, "link", "set", "dev", "inside", "up")
        with _peer(name, f"{theirs}:{_PORT}"):
            connection = Link(name, f"{theirs}:{_PORT}")
            try:
                yield connection
            finally:
                connection.close()
    finally:
        _run("ip", "netns", "del", name)  # and the cable with it


@contextmanager
def _peer(namespace: str, address: str) -> Iterator[None]:
    script = Path(__file__).with_name("square_cube_stage.py")
    command = ["ip", "netns", "exec", namespace, sys.executable, str(script), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise SystemExit("the peer in the namespace did not start")
            yield
        finally:
            process.terminate()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()
        raise NoNamespaces(f"{' '.join(command[:3])}: {why}") from None
