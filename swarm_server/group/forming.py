"""The forming of a group by its leader: with followers on this machine, or on others if the group pays."""

from __future__ import annotations

import logging
import shlex
import statistics
from collections.abc import Callable

import torch

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_protocol.errors import SwarmError
from swarm_protocol.failures import undone_on_error
from swarm_protocol.process.invocation import typed
from swarm_server.core.config import ServerConfig
from swarm_server.group.group_key import read_group_key
from swarm_server.group.handshake import Hello
from swarm_server.group.links import Deal
from swarm_server.group.members import LocalGroup, MakeLoader, formed_links
from swarm_server.group.payoff import Payoff, measured
from swarm_server.group.remote import Lobby, RemoteGroup, listening
from swarm_server.machine.memory import hosted_bytes

_logger = logging.getLogger(__name__)


class GroupRefused(SwarmError):
    """A group on several machines would be slower than its members without it."""


def formed_group(
    config: ServerConfig,
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    make_loader: Callable[[], MakeLoader],
    still_wanted: Callable[[], bool],
) -> LocalGroup | RemoteGroup:
    """Start the followers on this machine, or wait for those on others while the group is ``still_wanted``.

    Raises:
        ValueError: the address or the key cannot be used.
        GroupRefused: a group with these followers would not pay.
        GroupEnded: a follower has ended meanwhile, or the group is not wanted any more.
    """
    if config.group_listen is None:
        return LocalGroup(make_loader(), config.group_size)
    assert config.group_key is not None, "the configuration has been checked"
    key = read_group_key(config.group_key, create=True)
    hello = Hello(config.quant, str(dtype))
    with listening(config.group_listen) as listener:
        _logger.info(
            "waiting for %d on other machines, with a copy of %s: %s",
            config.group_size - 1,
            config.group_key,
            _follower_command(config),
        )
        lobby = Lobby(listener, key, hello)
        with undone_on_error(lambda: lobby.keep(())):
            lobby.gather(config.group_size - 1, still_wanted)
            block_bytes = statistics.mean(hosted_bytes(checkpoint, config.quant))
            payoff = measured(lobby.links, config.quant, block_bytes, checkpoint.family.hidden_size)
            return _fastest_group(lobby, payoff, config.group_always)


def _fastest_group(lobby: Lobby, payoff: Payoff, is_forced: bool) -> RemoteGroup:
    """Form the group of those followers with which it is fastest, or of all if the user forces it."""
    everybody = range(len(lobby.links))
    chosen = everybody if is_forced else payoff.best_followers(len(everybody))
    judge(payoff.of(chosen or everybody), is_forced)
    if len(chosen) < len(everybody):
        _logger.warning(
            "the group leaves out %d of %d followers; with them it would reach %s",
            len(everybody) - len(chosen),
            len(everybody),
            payoff,
        )
    lobby.keep(chosen)
    payoff = payoff.of(chosen)
    return RemoteGroup(formed_links(lobby.links, Deal.by_speed(payoff.bytes_per_s)), payoff.free_bytes)


def _follower_command(config: ServerConfig) -> str:
    words = [
        "--model",
        config.model,
        "--quant",
        config.quant,
        "--follow",
        str(config.group_listen),
        "--group-key",
        "FILE",
    ]
    return f"{typed('server')} {shlex.join(words)}"


def judge(payoff: Payoff, is_forced: bool) -> None:
    """Raise GroupRefused if the group does not pay, unless the user forces it."""
    if payoff.gain > 1 or is_forced:
        _logger.info("the group reaches %s", payoff)
        return
    raise GroupRefused(
        f"the group would reach only {payoff}: expected a faster network or members of a similar speed; "
        "--group-always forms it anyway"
    )
