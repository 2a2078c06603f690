"""The records of servers of experts in the DHT, which are checked because strangers may write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from swarm_protocol.access.access_control import AccessControl
from swarm_training.experts.core.config import WIRE_VERSION
from swarm_training.experts.pb import experts_pb2 as pb

_MAX_ADDRESS_CHARS = 256
_FINGERPRINT_BYTES = 32


@dataclass(frozen=True, order=True)
class ExpertHolder:
    """A server of experts and its address, ``HOST:PORT``."""

    peer_id: str
    address: str
    tls_fingerprint: bytes


def record_of(own: ExpertHolder, hidden: int, following: Iterable[int], token: bytes = b"") -> bytes:
    """Return the serialised record of a server; ``token`` is its membership token for a private swarm."""
    return pb.ExpertsRecord(
        wire_version=WIRE_VERSION,
        hidden=hidden,
        address=own.address,
        tls_fingerprint=own.tls_fingerprint,
        next=sorted(following),
        token=token,
    ).SerializeToString()


def read_record(
    owner: str, data: bytes, hidden: int, size: int, access: AccessControl | None = None
) -> tuple[ExpertHolder, frozenset[int]]:
    """Return the server, and the coordinates at which it has experts in a dimension of this ``size``.

    ``access`` is the access control of a private swarm.

    Raises:
        ValueError: the record is not valid, is for experts that do not fit, or is of a server that is no member.
    """
    try:
        record = pb.ExpertsRecord.FromString(data)
    except (DecodeError, TypeError):
        raise ValueError("it is no record of experts") from None
    if record.wire_version != WIRE_VERSION or record.hidden != hidden:
        raise ValueError(
            f"the experts are of version {record.wire_version} and for rows of {record.hidden}: expected "
            f"{WIRE_VERSION} and {hidden}"
        )
    if access is not None and not access.is_server(owner, record.token):
        raise ValueError("a record of experts is of a server that is no member")
    if len(record.address) > _MAX_ADDRESS_CHARS or not record.address.isprintable():
        raise ValueError("the address in a record of experts is too long, or not printable")
    if len(record.tls_fingerprint) != _FINGERPRINT_BYTES:
        raise ValueError("the fingerprint in a record of experts is not that of a certificate")
    if any(at >= size for at in record.next):
        raise ValueError(f"a coordinate in a record of experts is outside the grid, which has {size} there")
    return ExpertHolder(owner, record.address, record.tls_fingerprint), frozenset(record.next)
