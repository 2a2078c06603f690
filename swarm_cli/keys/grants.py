"""The list of an organiser's grants and revocations, in a file beside the key: no server has a list of members."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from swarm_protocol.access.access_control import CLOCK_SKEW_S
from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import Grant, Revocation
from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.file_lock import lock


@dataclass(frozen=True)
class GrantEntry:
    """An entry of the file for one grant, without a secret. Times are Unix time in seconds.

    Attributes:
        revoked_at: the time of the revocation; None if the grant was not revoked.
    """

    id: str
    name: str
    role: str
    peer_id: str
    granted_at: float
    expires_at: float
    revoked_at: float | None = None

    @property
    def state(self) -> str:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at < time.time() else "valid"

    @property
    def matters(self) -> bool:
        """Return whether a server might still let the member in."""
        return self.expires_at + CLOCK_SKEW_S >= time.time()

    def revocation(self, key: OrganiserKey) -> Revocation:
        return Revocation(key.public, bytes.fromhex(self.id), self.expires_at)


class GrantsFile:
    """The file of grants beside the key, with one line of JSON for each grant: ``a.key.grants`` for ``a.key``."""

    def __init__(self, key_path: Path) -> None:
        self.path = key_path.with_name(f"{key_path.name}.grants")
        self._old_path = key_path.with_suffix(".grants")  # of earlier versions; a.key and a.pem share it

    def read(self) -> list[GrantEntry]:
        """Return all entries. Raise ValueError if the file cannot be read."""
        path = self.path
        try:
            if self._old_path.exists() and not self.path.exists():
                path = self._old_path
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ValueError(f"cannot read the list of grants {path}: {error.strerror}") from None
        try:
            return [GrantEntry(**json.loads(line)) for line in lines if line.strip()]
        except (ValueError, TypeError):
            raise ValueError(f"{path} is damaged: expected a line of JSON for each grant") from None

    def add(self, grant: Grant) -> None:
        """Add a grant. Raise ValueError if the file cannot be written."""
        with self._locked():
            entry = GrantEntry(
                grant.id.hex(), grant.name, str(grant.role), grant.peer_id, grant.granted_at, grant.expires_at
            )
            self._write([*self.read(), entry])

    def revoke(self, names: list[str]) -> list[GrantEntry]:
        """Mark grants as revoked that have not expired, by their ids or their members' names, and return them.

        Raises:
            ValueError: there is no such grant, or the file cannot be written.
        """
        with self._locked():
            entries = self.read()
            chosen: set[str] = set()
            for name in names:
                # A name may have several grants: all of them end.
                found = {entry.id for entry in entries if name in (entry.id, entry.name) and entry.matters}
                if not found:
                    raise ValueError(f"there is no grant of {name!r} that has not expired: see `swarm keys list`")
                chosen |= found
            now = time.time()
            revoked = [
                replace(entry, revoked_at=entry.revoked_at or now) if entry.id in chosen else entry for entry in entries
            ]
            self._write(revoked)
        return [entry for entry in revoked if entry.id in chosen]

    def revoked(self) -> list[GrantEntry]:
        """Return the revoked grants whose revocation still matters."""
        return [entry for entry in self.read() if entry.revoked_at is not None and entry.matters]

    def _write(self, entries: list[GrantEntry]) -> None:
        try:
            with written_atomically(self.path) as partial:
                partial.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in entries))
        except OSError as error:
            raise ValueError(f"cannot write the list of grants {self.path}: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file inside the context, so that two commands at once do not lose each other's entries."""
        try:
            # A file of its own, because ``_write`` replaces the list, and a lock stays with the old file.
            with open(self.path.with_suffix(".grants.lock"), "w") as opened:
                lock(opened)
                yield
        except OSError as error:
            raise ValueError(f"cannot write the list of grants {self.path}: {error.strerror}") from None
