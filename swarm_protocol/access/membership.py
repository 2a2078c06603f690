"""Membership files: each holds a member's token, and the member's key unless the member has a key file already."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from swarm_protocol.access.member_flags import ENVIRONMENT
from swarm_protocol.access.organiser import SwarmKey, write_secret
from swarm_protocol.access.tokens import Grant, Role
from swarm_protocol.net.identity import Identity
from swarm_protocol.pb import swarm_pb2 as pb

_PREFIX = "swarm-membership-1:"
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class MemberCredentials:
    """The credentials of a member of a private swarm; its ``repr`` shows no secret.

    Attributes:
        grant: the parsed token.
        token: the signed grant, in bytes.
        identity: the member's key, if it came with the token.
    """

    grant: Grant
    token: bytes = field(repr=False)
    identity: Identity | None = field(default=None, repr=False)

    @classmethod
    def read(cls, path: Path | None, environment: Mapping[str, str] = os.environ) -> MemberCredentials | None:
        """Read the file, or else the environment variable SWARM_MEMBERSHIP; return None if neither is given.

        Raises:
            ValueError: the file cannot be read, or the text is not a membership.
        """
        if path is not None:
            try:
                with path.open("rb") as file:
                    text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
            except OSError as error:
                raise ValueError(f"cannot read the membership file {path}: {error.strerror}") from None
            return cls._parse(text, str(path))
        text = environment.get(ENVIRONMENT, "")
        return cls._parse(text, f"the environment variable {ENVIRONMENT}") if text.strip() else None

    @classmethod
    def _parse(cls, text: str, where: str) -> MemberCredentials:
        wrong = f"{where} has no membership in it: expected what `swarm keys grant` has written"
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if len(lines) != 1 or not lines[0].startswith(_PREFIX):
            raise ValueError(wrong)
        try:
            message = pb.MembershipFile.FromString(base64.b64decode(lines[0].removeprefix(_PREFIX), validate=True))
            identity = Identity.from_bytes(message.identity) if message.identity else None
            grant = Grant.parse(message.token)
        except (DecodeError, ValueError):
            raise ValueError(wrong) from None
        if identity is not None and identity.peer_id != grant.peer_id:
            raise ValueError(wrong)
        return cls(grant, message.token, identity)

    def write(self, path: Path) -> None:
        """Write the membership file; raise ValueError if the file exists already or cannot be written."""
        message = pb.MembershipFile(token=self.token, identity=self.identity.to_bytes() if self.identity else b"")
        until = time.strftime("%Y-%m-%d", time.gmtime(self.grant.expires_at))
        secret = "has a private key: keep it secret" if self.identity else "of use only with the member's key file"
        text = f"# {self.grant.name}, {self.grant.role} of swarm {self.grant.swarm_key} until {until}; {secret}\n"
        text += _PREFIX + base64.b64encode(message.SerializeToString()).decode() + "\n"
        write_secret(path, text.encode())

    def require(self, role: Role, swarm_key: SwarmKey | None) -> None:
        """Check the membership locally, so that the user sees a mistake before a server rejects it.

        Raises:
            ValueError: the membership is for another role or swarm, or has expired.
        """
        if swarm_key not in (None, self.grant.swarm_key):
            raise ValueError(f"the membership is of swarm {self.grant.swarm_key}, and not of swarm {swarm_key}")
        if not self.grant.role.may_act_as(role):
            raise ValueError(f"the membership is for the role {self.grant.role}: expected {role}")
        if self.grant.expires_at < time.time():
            until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.grant.expires_at))
            raise ValueError(f"the membership expired at {until}: ask the organiser of the swarm for another")

    def identity_or(self, own: Identity | None) -> Identity:
        """Return the key that the token is for: the key that came with the token, or else the member's ``own``.

        Raises:
            ValueError: the member's own key is needed, but is missing or belongs to another peer.
        """
        identity = self.identity or own
        if identity is None:
            raise ValueError(f"the membership is for peer {self.grant.peer_id}: give its key file by --identity")
        if identity.peer_id != self.grant.peer_id:
            raise ValueError(
                f"the membership is for peer {self.grant.peer_id}, and the key is that of {identity.peer_id}"
            )
        return identity
