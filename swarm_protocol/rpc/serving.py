"""The server side of gRPC: it listens, authenticates and authorises callers, and reports errors as statuses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from swarm_protocol.access.access_control import AccessControl
from swarm_protocol.access.tokens import Role
from swarm_protocol.errors import RequestRejected, SwarmError
from swarm_protocol.net.hosts import host_port
from swarm_protocol.net.tls import Certificate, peer_of, token_of
from swarm_protocol.wire.constants import SERVER_OPTIONS
from swarm_protocol.wire.printable import printable
from swarm_protocol.wire.status import end_with, status_of

if TYPE_CHECKING:
    _Context = grpc.aio.ServicerContext[Any, Any]
_logger = logging.getLogger(__name__)


def admitted(context: _Context, access: AccessControl | None, role: Role = Role.TRAINER) -> str:
    """Return the caller's peer id; ``access`` is that of a private swarm.

    Raises:
        AccessDenied: the caller has shown no certificate, or may not act in this role.
    """
    auth = context.auth_context()
    peer_id = peer_of(auth)
    if access is not None:
        access.require(role, peer_id, token_of(auth))
    return peer_id


@asynccontextmanager
async def errors_as_status(context: _Context) -> AsyncIterator[None]:
    """End the call with a status if the context raises; the handler must return afterwards, see ``end_with``."""
    try:
        yield
    except SwarmError as error:
        end_with(context, status_of(error), printable(str(error)))
    except TimeoutError:
        end_with(context, grpc.StatusCode.DEADLINE_EXCEEDED, "this peer has waited too long")
    except ValueError as error:
        end_with(context, status_of(RequestRejected("")), printable(str(error)))
    except grpc.aio.BaseError as error:
        _logger.debug("a caller went away: %s", error)


async def start_server(
    add_services: Callable[[grpc.aio.Server], None], certificate: Certificate, host: str, port: int
) -> tuple[grpc.aio.Server, int]:
    """Start a server, and return it with its port; ``add_services`` receives the server before it starts.

    Raises:
        ValueError: the server cannot listen on the address.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_services(server)
    address = host_port(host, port)
    try:
        bound = server.add_secure_port(address, certificate.server_credentials())
    except RuntimeError:
        raise ValueError(f"cannot listen on {address}: expected a free port on an address of this host") from None
    await server.start()
    return server, bound
