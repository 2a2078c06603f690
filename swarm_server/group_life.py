"""The life of a member of a group on several machines: it meets the others in the swarm, and then leads or follows."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial

from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import FROM_SWARM, locate
from swarm_models.checkpoints.files import HubUnreachable
from swarm_protocol.errors import JoinRefused, NoSwarm
from swarm_protocol.failures import undone_on_error
from swarm_protocol.process.routine import end_tasks, repeat
from swarm_server.core.access import server_access
from swarm_server.core.config import ServerConfig
from swarm_server.group.following import Follower
from swarm_server.group.forming import GroupLeader
from swarm_server.group.group_key import read_group_key
from swarm_server.group.handshake import Hello
from swarm_server.group.remote import Lobby
from swarm_server.node.hosting import devices_and_dtype, follower_loader
from swarm_server.node.joining import SwarmMembership, join
from swarm_server.placement.group_leader import chosen_leader

_logger = logging.getLogger(__name__)
_MEET_S = 20.0  # how long a member waits for the others before it leads those that have come
_LOOK_S = 1.0
_REACH_S = 10.0  # for the leader that the swarm names to answer
_RETRY_S = 5.0  # between two attempts to join the swarm again


class GroupProcess:
    """A member of a group on several machines, until its process ends."""

    def __init__(self, config: ServerConfig) -> None:
        """Prepare to be a member as ``config`` says.

        Raises:
            ValueError: the device, the address or the key cannot be used.
            CheckpointError, UnsupportedModel: the model cannot be used.
        """
        assert config.group_key is not None, "the configuration has been checked"
        self._config = config
        self._hello = Hello(config.quant, str(devices_and_dtype(config)[1]), _revision(config))
        self._key = read_group_key(config.group_key, create=True)
        self._leader = None if config.group_listen is None else self._new_leader(config.group_listen)

    def lead(self, loop: asyncio.AbstractEventLoop) -> GroupLeader | None:
        """Follow other leaders until this process should lead the group, and return its leader; None after a signal.

        If the swarm could be joined only through a leader that has ended, wait until that leader is back.

        Raises:
            FollowerLeftOut: the group is faster without this process, which is no member of it any more.
            ValueError, SwarmError: the swarm, the leader or the model cannot be used.
        """
        has_followed = False
        with undone_on_error(self._leave):
            while self._config.group is not None and not (self._leader is not None and self._leader.leads):
                try:
                    address = loop.run_until_complete(self._leader_elsewhere())
                except NoSwarm as error:
                    if not has_followed or isinstance(error, JoinRefused):
                        raise
                    _logger.warning("the group's leader has ended, and %s; trying again in %g s", error, _RETRY_S)
                    time.sleep(_RETRY_S)
                    continue
                if address is not None and not self._follow(address):
                    return None
                has_followed = True
        return self._leader

    def _leave(self) -> None:
        if self._leader is not None:
            self._leader.close()

    async def _leader_elsewhere(self) -> str | None:
        """Meet the other members in the swarm. Return the address of the leader to follow, or None to lead."""
        config = self._config
        assert config.group is not None
        async with AsyncExitStack() as cleanup:
            access = server_access(config)
            cleanup.callback(access.release)
            membership = await join(config, access, cleanup)
            # Members that start together may each have begun a swarm of their own, which this task merges.
            keeping: asyncio.Task[None] = asyncio.ensure_future(repeat(partial(_keep, membership), (_LOOK_S, _LOOK_S)))
            cleanup.push_async_callback(end_tasks, [keeping])
            if self._leader is None:
                self._leader = self._new_leader(membership.host, membership.own_addresses().hosts()[0])
            registry = membership.dht.candidates(config.group, self._key, access.token)
            own, until = self._leader.candidate(), time.monotonic() + _MEET_S
            _logger.info("looking for members of group %s; this one is at %s", config.group, own.address)
            while True:
                await registry.publish(own)
                candidates = [own, *(each for each in await registry.read() if each.name != own.name)]
                chosen = chosen_leader(candidates, config.group_size, waits=time.monotonic() < until)
                if chosen is not None and chosen != own:
                    return chosen.address
                if chosen is not None:
                    if len(candidates) == 1:
                        _logger.warning("nobody else in group %s has this group key: serving alone", config.group)
                    self._leader.lead()
                    await registry.publish(self._leader.candidate())
                    return None
                await asyncio.sleep(_LOOK_S)

    def _follow(self, address: str) -> bool:
        """Follow the leader at this address until it ends. Return False after a signal."""
        config = self._config
        checkpoint = ModelCheckpoint.open(locate(config.model), config.model_revision)
        follower = Follower(address, self._key, self._hello, follower_loader(config, checkpoint))
        return follower.follow(_REACH_S)

    def _new_leader(self, address: str, announced_host: str | None = None) -> GroupLeader:
        return GroupLeader(self._config, Lobby(address, self._key, self._hello, announced_host), self._key)


async def _keep(membership: SwarmMembership) -> None:
    await membership.keep()  # its result is dropped, because ``repeat`` would end with it


def _revision(config: ServerConfig) -> str:
    """Return the revision of the model; empty if the model comes from the swarm, which has not been joined yet."""
    if config.model.startswith(FROM_SWARM):
        return ""
    try:
        return ModelCheckpoint.open(locate(config.model), config.model_revision).revision
    except HubUnreachable:
        return ""
