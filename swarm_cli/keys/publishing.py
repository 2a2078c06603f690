"""The publication of revocations to a running swarm."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_cli.keys.grants import GrantEntry
from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.swarm.caller import join_swarm
from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.errors import NoSwarm
from swarm_protocol.net.identity import Identity


def publish(config: ClientConfig, key: OrganiserKey, revoked: Sequence[GrantEntry]) -> None:
    """Publish revocations, which servers then keep until the grants would expire.

    Raises:
        NoSwarm: no server took one of the revocations. The file of grants has them, to be published later.
    """
    try:
        background.run(_publish(config, key, revoked))
    except NoSwarm as error:
        raise NoSwarm(
            f"the swarm has not received the revocation, so it still lets revoked members in: {error}. Once it runs: "
            "`swarm keys publish`"
        ) from None


async def _publish(config: ClientConfig, key: OrganiserKey, revoked: Sequence[GrantEntry]) -> None:
    dht = await join_swarm(config, Identity.generate(), AccessControl(key.public))
    try:
        assert dht.revocations is not None
        for entry in revoked:
            if not await dht.revocations.publish(bytes.fromhex(entry.id), entry.revocation(key).signed(key)):
                raise NoSwarm(f"no server of swarm {config.swarm!r} took the revocation of {entry.name}")
    finally:
        await dht.shutdown()
