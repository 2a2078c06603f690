"""The organiser of a private swarm, who makes members and revokes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_cli.command_line import main
from swarm_cli.keys.grants import GrantsFile
from swarm_protocol.access.membership import MemberCredentials
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Role
from tests.quick_keys import new_identity


@dataclass
class Organiser:
    """An organiser whose key, list of grants and members' files are in one directory."""

    directory: Path
    key: OrganiserKey

    @classmethod
    def of(cls, directory: Path, **fields: Any) -> Any:
        """Make a key. ``fields``: those of a class that has more than an organiser."""
        key = OrganiserKey.generate()
        key.save(directory / "organiser.key")
        return cls(directory=directory, key=key, **fields)

    def credentials(self, role: Role, name: str = "ada") -> MemberCredentials:
        """A new member, who is in the organiser's list."""
        identity, now = new_identity(), time.time()
        grant = Grant.new(self.key.public, role, name, identity.peer_id, now - 1e6, now + 1e6)
        GrantsFile(self.directory / "organiser.key").add(grant)
        return MemberCredentials(grant, grant.signed(self.key), identity)

    def membership(self, role: Role, name: str) -> Path:
        path = self.directory / f"{name}.membership"
        self.credentials(role, name).write(path)
        return path

    def revoke(self, name: str, swarm: str, peers: Sequence[str]) -> None:
        """As the organiser types it."""
        key = str(self.directory / "organiser.key")
        main(["keys", "revoke", name, "--key", key, "--swarm", swarm, "--initial-peers", *peers])
