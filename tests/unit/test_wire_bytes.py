"""The bytes that peers exchange and sign stay as they are: their digests are stored in ``wire_bytes.json``.

``python -m tests.unit.test_wire_bytes > tests/unit/wire_bytes.json`` stores those of a version that changes them.
"""

import json
import zlib
from copy import copy
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from swarm_protocol.access.organiser import OrganiserKey
from swarm_protocol.access.tokens import ID_BYTES, Grant, Revocation, Role
from swarm_protocol.dht.stored_records import subkey_of
from swarm_protocol.pb import swarm_pb2 as pb
from swarm_protocol.span import Span
from swarm_protocol.tunnel.members import RelayCredentials
from swarm_protocol.verification.statements import Signer
from swarm_protocol.wire.block_input import BlockInput
from swarm_training.core import signing
from swarm_training.core.record import Progress
from swarm_training.ledger.signing import ContentKind, sign
from tests.worlds.identities import identity

ROOT = Path(__file__).parents[2]
STORED = Path(__file__).with_name("wire_bytes.json")


def signed() -> dict[str, bytes]:
    """Return the bytes that are signed for each purpose, with an organiser's signatures, which do not vary."""
    own, signed = copy(identity(0)), []
    own.private_key = SimpleNamespace(sign=lambda data: signed.append(data) or b"")
    states = torch.ones(1, 2, 4)
    Signer(own, lambda: pb.ServerRecord(model="m"), lambda: 1.5).sign(Span(0, 2), BlockInput(states), states[0])
    RelayCredentials(own, b"token").shown("caller", "relay")
    signing.sign(Progress("run", own.peer_id, step=3), own)
    for kind in ContentKind:
        sign(kind, pb.Span(start=1, end=2), own, b"token")
    key, grant = OrganiserKey(Ed25519PrivateKey.from_private_bytes(bytes(32))), bytes(ID_BYTES)
    signed.append(Grant(key.public, grant, Role.SERVER, "name", "peer", 1.0, 2.0).signed(key))
    signed.append(Revocation(key.public, grant, 2.0).signed(key))
    names = "answer", "member", "progress", *(kind.name for kind in ContentKind)
    return {f"signed: {name}": data for name, data in zip((*names, "grant", "revocation"), signed, strict=True)}


def value_of(field: FieldDescriptor, depth: int = 2) -> Any:
    """Return a value that follows from the name of the field; messages inside it are filled to this depth."""
    value: Any = True if field.type == field.TYPE_BOOL else zlib.crc32(field.full_name.encode()) >> 1
    if field.message_type is not None:
        inner = {each.name: value_of(each, depth - 1) for each in field.message_type.fields if depth}
        if field.message_type.GetOptions().map_entry:
            return {inner["key"]: inner["value"]} if inner else {}
        value = GetMessageClass(field.message_type)(**inner)
    elif field.enum_type is not None:
        value = field.enum_type.values[-1].number
    elif field.cpp_type == field.CPPTYPE_STRING:
        value = field.full_name.encode() if field.type == field.TYPE_BYTES else field.full_name
    return [value] if field.is_repeated else value


def described(kind: Descriptor) -> bytes:
    """Return each field's name, number and type, and its bytes in a message without others, which a oneof excludes."""
    fields = []
    for field in kind.fields:
        names = [each.full_name for each in (field.message_type, field.enum_type) if each is not None]
        choices = [] if field.enum_type is None else [(each.name, each.number) for each in field.enum_type.values]
        alone = GetMessageClass(kind)(**{field.name: value_of(field)}).SerializeToString(deterministic=True)
        fields.append((field.name, field.number, field.type, field.is_repeated, names, choices, alone))
    return repr(sorted(fields)).encode()


def digests() -> dict[str, str]:
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("swarm_*/**/*_pb2.py")]
    kinds = [kind for name in modules for kind in import_module(name).DESCRIPTOR.message_types_by_name.values()]
    kinds += [inner for kind in kinds for inner in kind.nested_types]
    found = {kind.full_name: described(kind) for kind in kinds} | signed() | {"subkey": subkey_of(identity(0)).encode()}
    return {name: sha256(found[name]).hexdigest() for name in sorted(found)}


def test_the_bytes_on_the_wire_are_those_of_other_versions() -> None:
    assert digests() == json.loads(STORED.read_text())


if __name__ == "__main__":
    print(json.dumps(digests(), indent=2))
