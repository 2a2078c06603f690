"""A server's access to its swarm, and the revocations that it keeps on disk."""

from __future__ import annotations

import base64
import logging
from contextlib import suppress

import platformdirs

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.swarm_access import SwarmAccess
from swarm_protocol.access.tokens import Role
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import AccessDenied
from swarm_server.core.config import ServerConfig

_logger = logging.getLogger(__name__)
_MAX_FILE_BYTES = 4 << 20


def server_access(config: ServerConfig) -> SwarmAccess:
    """Return the access from the files in the configuration. Raise ValueError as ``SwarmAccess.of`` does."""
    access = SwarmAccess.of(
        Role.SERVER, config.membership, config.identity, config.swarm_key, open_to_clients=config.open_to_clients
    )
    if access.control is not None:
        KnownRevocations(access.control).load()
    return access


def warn_if_no_member(access: SwarmAccess) -> None:
    """Log a warning if a server's membership has ended, because the swarm no longer sees the server then."""
    if access.control is not None:
        try:
            access.control.require(Role.SERVER, access.identity.peer_id, access.token)
        except AccessDenied as error:
            _logger.warning("the swarm does not see this server any more: %s", error)


class KnownRevocations:
    """A copy of the revocations in the user's cache directory, because the DHT loses them when all servers are gone."""

    def __init__(self, control: AccessControl) -> None:
        self._control = control
        self._path = platformdirs.user_cache_path("swarm") / "revocations" / str(control.swarm_key)
        self._saved: set[bytes] = set()

    def load(self) -> None:
        """Load the saved revocations; the file need not be trusted, because the organiser's signature is checked."""
        with suppress(OSError), self._path.open("rb") as file:
            for line in file.read(_MAX_FILE_BYTES).split():
                with suppress(ValueError):
                    self._control.revoke(base64.b64decode(line))

    def save(self) -> None:
        """Save the revocations if they have changed since the last call."""
        known = self._control.revocations()
        if set(known) == self._saved:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with written_atomically(self._path) as partial:
                partial.write_bytes(b"".join(base64.b64encode(data) + b"\n" for data in known.values()))
        except OSError as error:
            _logger.info("revocations cannot be kept on disk: %s", error)
        self._saved = set(known)  # also after an error, which is therefore logged once for each change
