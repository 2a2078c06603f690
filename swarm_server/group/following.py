"""The life of a follower: a process that holds rows of the blocks of a leader on another machine."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType

import torch

from swarm_protocol.process import signals
from swarm_server.core.config import ServerConfig
from swarm_server.group.group_key import read_group_key
from swarm_server.group.handshake import Hello
from swarm_server.group.members import MakeLoader, follow
from swarm_server.group.remote import connected_to_leader

_logger = logging.getLogger(__name__)


def follow_leader(config: ServerConfig, dtype: torch.dtype, make_loader: MakeLoader) -> None:
    """Hold rows of the leader's blocks until a signal ends this process.

    When the leader ends, the follower waits until it is there again. ``dtype`` is that of computation.

    Raises:
        ValueError, SwarmError: the model, the key or the leader cannot be used; one sentence says why.
    """
    assert config.follow is not None and config.group_key is not None, "the configuration has been checked"
    address, key = config.follow, read_group_key(config.group_key, create=False)
    hello = Hello(config.quant, str(dtype))
    _until_signal(lambda: _follow_for_ever(address, key, hello, make_loader))


def _follow_for_ever(address: str, key: bytes, hello: Hello, make_loader: MakeLoader) -> None:
    load = make_loader()  # in this thread, whose number of threads it sets
    while True:
        link = connected_to_leader(address, key, hello)
        follow(load, link, lambda place: print(f"following leader={address} {place}", flush=True))
        link.close()
        _logger.info("the group has ended; this follower waits for the leader at %s", address)


def _until_signal(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread, because compiled code does not see signals, until it fails or a signal comes."""
    failures: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again in the main thread
            failures.append(error)
        done.set()

    def end(_number: int, _frame: FrameType | None) -> None:
        done.set()

    for number in (signal.SIGINT, *signals.ending_signals()):
        signal.signal(number, end)
    threading.Thread(target=run, daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]
