"""``volunteer``, which takes part in the run of a run file from Python, for instance from a notebook."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from swarm_models.gpu.devices import named_device
from swarm_training.commands.flags import joining_as, parse_part
from swarm_training.commands.joining import prepare, take_part
from swarm_training.contract.backend import PeerAddress
from swarm_training.core_backend import BACKEND
from swarm_training.runfile.reading import read_run_file


def volunteer(
    run_file: str | Path,
    initial_peers: Sequence[str] = (),
    *,
    membership: str | Path | None = None,
    identity: str | Path | None = None,
    part: str | None = None,
    address: PeerAddress | None = None,
    client_mode: bool = False,
    device: str = "auto",
    say: Callable[[str], object] = print,
) -> nn.Module:
    """Train as ``swarm train join`` does, until the schedule ends or a KeyboardInterrupt comes, and leave cleanly.

    Args:
        initial_peers: multiaddrs of members of the run; empty: this peer founds the run.
        membership, identity: paths of files; ``membership`` is needed in a run with an organiser.
        part: the part of the data, such as "2/5", where peers have shared the data out.
        address: how others reach this peer; by default at its address on the route to the initial peers, and a founder
            from its own machine alone.
        client_mode: whether nobody can call this peer, so that it calls others; it cannot found a run.
        say: called with a line for each step.

    Returns:
        The model as it is after the last global step that this peer took.

    Raises:
        ValueError: an argument or the run file is wrong.
        NoSwarm, PeerUnavailable: no initial peer answered, or none of them trains this run.
        AccessDenied: the peer may not take part.
    """
    if isinstance(initial_peers, str):
        raise ValueError("initial_peers is a text: expected a list of multiaddrs")
    if device != "auto":
        named_device(device)
    file = read_run_file(Path(run_file))
    own_part = None if part is None else parse_part(part)
    files = [None if path is None else Path(path) for path in (membership, identity)]
    if client_mode and not initial_peers:
        raise ValueError("client_mode needs initial_peers: a run is founded by a peer that others can call")
    who = joining_as("TRAINER", file, initial_peers, *files, locks=True)
    who = replace(who, address=address or PeerAddress(), client_mode=client_mode)
    try:
        trained = prepare(file, who, own_part, device, say)
        try:
            take_part(trained, who, BACKEND.open_run, threading.Event(), say)
        except KeyboardInterrupt:  # raised by "interrupt the kernel": the model is still wanted
            say("stopped")
        return trained.model
    finally:
        if who.identity.lock is not None:  # a notebook keeps the last error, and with it the identity
            who.identity.lock.close()
