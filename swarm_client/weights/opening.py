"""Opens the model that a user names, and joins the swarm first if members are to send its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swarm_client.core import background
from swarm_client.core.config import ClientConfig
from swarm_client.swarm.caller import ClientIdentity
from swarm_client.swarm.swarm import BlockTraits, Swarm
from swarm_models.checkpoints.checkpoint import ModelCheckpoint
from swarm_models.checkpoints.default_model import FROM_SWARM, check_source, locate
from swarm_models.checkpoints.describing import has_states
from swarm_models.checkpoints.family import has_experts
from swarm_models.checkpoints.files import HubUnreachable
from swarm_models.sharing.obtaining import SharingSwarm, open_from_swarm
from swarm_protocol.dht.records import ServerRecord
from swarm_protocol.errors import CheckpointError

if TYPE_CHECKING:
    from swarm_client.transport.transport import ServerConnection
    from swarm_protocol.dht.dht import Dht
    from swarm_protocol.rpc.stubs import ServiceStub


class ModelOpening:
    """An opener of a model, which also connects to its swarm. After ``close``, no more files come from members."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._caller = ClientIdentity(config)
        self._dht: Dht | None = None
        self._members: dict[tuple[str, bytes], ServerConnection] = {}

    def open(self, name_or_path: str | Path, revision: str | None) -> ModelCheckpoint:
        """Open the model. It comes from the swarm if its name begins with ``swarm://``, or the hub cannot be reached.

        Raises:
            CheckpointError: the model cannot be read. NoSwarm: no member of the swarm answers. ValueError: the
                configuration says which files to take from members, but the model may come from elsewhere.
        """
        name, failure = str(name_or_path), None
        check_source(self._config.weights, name)
        if not name.startswith(FROM_SWARM):
            location = locate(name)
            try:
                return ModelCheckpoint.open(location, revision)
            except HubUnreachable as error:
                if not (self._config.initial_peers or self._config.discover):
                    raise
                failure = error
        return background.run(self._from_swarm(name.removeprefix(FROM_SWARM), revision, failure))

    def swarm(self, checkpoint: ModelCheckpoint) -> Swarm:
        """Return the connection to the model's servers. It takes over the DHT node, if there is one, and closes it."""
        swarm = Swarm(
            self._config,
            checkpoint.name,
            checkpoint.revision,
            checkpoint.family.num_blocks,
            traits=BlockTraits(
                checkpoint.family.hidden_size,
                routed=has_experts(checkpoint.config),
                has_states=has_states(checkpoint.family, checkpoint.config),
            ),
            caller=self._caller,
            dht=self._dht,
        )
        self._dht = None
        return swarm

    def close(self) -> None:
        """End the connections to members, and leave the swarm unless ``swarm`` has taken it over."""
        if self._members or self._dht is not None:
            background.run(self._close())

    async def _from_swarm(self, name: str, revision: str | None, failure: CheckpointError | None) -> ModelCheckpoint:
        self._dht = await self._caller.join(self._config)
        swarm = SharingSwarm(self._dht.models, self._dht.view, self._stub, background.run)
        return await open_from_swarm(swarm, name, revision, self._config.weights, failure=failure)

    async def _stub(self, server: ServerRecord) -> ServiceStub:
        key = server.peer_id, server.tls_fingerprint
        if key not in self._members:
            self._members[key] = await self._caller.connect(server, self._config)
        return self._members[key].stub

    async def _close(self) -> None:
        for member in self._members.values():
            await member.close()
        if self._dht is not None:
            await self._caller.close()
            await self._dht.shutdown()
