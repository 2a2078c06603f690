"""A server's identity, and its access control: it admits everybody, or only the members of a private swarm."""

from __future__ import annotations

import base64
import logging
from contextlib import suppress
from dataclasses import dataclass, field

import platformdirs

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.access.tokens import Role
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.errors import AccessDenied
from swarm_protocol.net.identity import Identity, locked_key_file
from swarm_server.core.config import ServerConfig

_logger = logging.getLogger(__name__)
_MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True)
class ServerAccess:
    """The identity and access control of one server.

    Attributes:
        token: the membership token; empty if the swarm is not private.
        control: the access control; None if everybody is admitted.
    """

    identity: Identity
    token: bytes = field(default=b"", repr=False)
    control: AccessControl | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> ServerAccess:
        """Read the files that the configuration names, or else the environment variable SWARM_MEMBERSHIP.

        Raises:
            ValueError: a file cannot be used, or the files do not fit together.
        """
        member = read_member(config)
        if member is None:
            return cls(Identity.load_or_create(config.identity) if config.identity else Identity.generate())
        own = None
        if member.identity is None and config.identity is not None:
            own = Identity.load_or_create(config.identity)
        identity = member.identity_or(own)
        if member.identity is not None and config.membership is not None:
            identity.lock = locked_key_file(config.membership)
        control = AccessControl(member.grant.swarm_key, open_to_clients=config.open_to_clients)
        KnownRevocations(control).load()
        return cls(identity, member.token, control)

    def warn_if_no_member(self) -> None:
        """Log a warning if this server's membership has ended, because the swarm no longer sees the server then."""
        if self.control is not None:
            try:
                self.control.require(Role.SERVER, self.identity.peer_id, self.token)
            except AccessDenied as error:
                _logger.warning("the swarm does not see this server any more: %s", error)


def read_member(config: ServerConfig) -> MemberCredentials | None:
    """Read the membership. Raise ValueError if it is not what this server needs; see ``ServerAccess.of``."""
    swarm_key = SwarmKey.parse(config.swarm_key) if config.swarm_key else None
    member = MemberCredentials.read(config.membership)
    if member is not None:
        member.require(Role.SERVER, swarm_key)
    elif swarm_key is not None:
        raise ValueError("a server of a private swarm must be a member of it: give --membership FILE")
    elif config.open_to_clients:
        raise ValueError("a swarm that is not private is open to clients: expected --open-to-clients with --membership")
    return member


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
        self._saved = set(known)
