"""The run of a server, or of a follower of a group, until a signal ends it.

Only these functions import torch, after the command line has been checked.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from typing import TYPE_CHECKING

from swarm_models.checkpoints.default_model import locate
from swarm_protocol.process import signals
from swarm_server.core.config import ServerConfig
from swarm_server.group.group_key import read_group_key

if TYPE_CHECKING:
    from swarm_server.node.server import Server

_logger = logging.getLogger(__name__)
LEAVE_S = 20.0  # for what a server does after draining, such as withdrawing its record
# Objects between two collections of the youngest. A batch of steps makes more than the default of 700, and frees them
# itself. Where cycles keep much memory, ``HeapTrimmer`` collects sooner.
_NEW_OBJECTS = 10_000


async def serve(server: Server) -> None:
    """Run the server until it ends, or has drained after a signal."""
    from swarm_server.group.links import GroupEnded

    running = asyncio.ensure_future(server.run())
    received: list[signal.Signals] = []

    def leave(number: signal.Signals) -> None:
        if number is signals.HANGUP:
            signals.leave_terminal()
            if received:  # a terminal that closes may send two signals
                return
        received.append(number)
        if len(received) > 1:
            os._exit(signals.INTERRUPTED)
        server.stop()
        # This timer ends the server after a signal, whatever hangs.
        asyncio.get_running_loop().call_later(server.config.drain_timeout_s + LEAVE_S, os._exit, 1)
        if not server.ready:
            running.cancel()

    before = {number: signal.getsignal(number) for number in signals.all_ending_signals()}
    for number in before:
        signals.call_on_signal(number, leave)
    try:
        await running
    except (asyncio.CancelledError, GroupEnded):  # a group may end while its server drains
        if not received:
            raise
    finally:
        if not received:  # else the process ends, and another signal ends it at once
            for number, handler in before.items():
                signals.stop_calling(number, handler)


def run(config: ServerConfig) -> None:
    """Serve until a signal ends the server.

    Raises:
        ValueError, SwarmError: see ``Server.run`` and ``GroupProcess``.
    """
    from swarm_protocol.imports.light_imports import collected_later, import_transformers
    from swarm_protocol.process.network_loop import new_event_loop

    with collected_later():
        import_transformers()
        from swarm_server.group.links import GroupEnded
        from swarm_server.group.members import FollowerLeftOut
        from swarm_server.group_life import GroupProcess
        from swarm_server.node.server import Server

    gc.set_threshold(_NEW_OBJECTS)
    loop = new_event_loop()
    member = GroupProcess(config) if config.group or config.group_listen else None
    while True:
        try:
            leader = None if member is None else member.lead(loop)
            if leader is not None or member is None:
                # Not asyncio.run(), which would wait after a signal for threads that still load.
                loop.run_until_complete(serve(Server(config, leader)))
            return
        except FollowerLeftOut as error:
            _logger.warning("%s; this server serves without the group until it is started again", error)
            config, member = config.without_group(), None
        except GroupEnded as error:
            left = "with the members that are there"
            if member is None:
                config = config.without_a_member()
                left = "alone" if config.group_size == 1 else f"with a group of {config.group_size}"
            _logger.warning("%s; this server has left the swarm, and starts again %s", error, left)


def follow(config: ServerConfig) -> None:
    """Be a follower in a group until a signal ends this process.

    Raises:
        ValueError, SwarmError: see ``Follower.follow_for_ever``.
    """
    from swarm_protocol.imports.light_imports import collected_later, import_transformers

    with collected_later():
        import_transformers()
        from swarm_models.checkpoints.checkpoint import ModelCheckpoint
        from swarm_server.group.following import Follower
        from swarm_server.group.handshake import Hello
        from swarm_server.node.hosting import devices_and_dtype, follower_loader

    checkpoint = ModelCheckpoint.open(locate(config.model), config.model_revision)
    assert config.follow is not None and config.group_key is not None, "the configuration has been checked"
    key = read_group_key(config.group_key, create=False)
    hello = Hello(config.quant, str(devices_and_dtype(config)[1]), checkpoint.revision)
    Follower(config.follow, key, hello, follower_loader(config, checkpoint)).follow_for_ever()
