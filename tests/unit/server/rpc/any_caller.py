"""Checks that admit every caller, for servers of tests that speak without TLS, which would show who calls."""

from __future__ import annotations

from swarm_protocol.access.tokens import Role
from swarm_protocol.net.shares import Caller
from swarm_server.rpc.service import CallerChecks


class AnyCaller(CallerChecks):
    """Takes each caller for the same client."""

    def admit(self, context: object, role: Role = Role.CLIENT) -> Caller:
        return Caller("client")
