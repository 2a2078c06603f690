"""Parser for untrusted messages: it refuses invalid ones, and ones that would take far more memory than their size."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from swarm_protocol.errors import RequestRejected

T = TypeVar("T", bound=Message)
MAX_FIELDS = 4096  # of one message with all nested ones; an honest message has a tenth
_SMALL_BYTES = 64 * 1024  # messages up to this size are parsed unchecked: they take at most 4 MB of memory
_VARINT, _I64, _LENGTH, _I32 = 0, 1, 2, 5  # https://protobuf.dev/programming-guides/encoding/
_FIXED_BYTES = {_I64: 8, _I32: 4}
_MAX_DEPTH = 16


def parse(kind: type[T], data: bytes) -> T:
    """Parse a message; raise RequestRejected if the bytes are no such message, or have very many fields.

    An empty nested message takes two bytes on the wire, but a hundred once it is parsed.
    """
    try:
        if len(data) > _SMALL_BYTES:
            _count(memoryview(data), kind.DESCRIPTOR, 0, 0)
        return kind.FromString(data)
    except (DecodeError, IndexError, UnicodeDecodeError):
        raise RequestRejected(f"the bytes sent are no message: expected a {kind.DESCRIPTOR.name}") from None


def _count(data: memoryview, kind: Any, num_fields: int, depth: int) -> int:
    """Return ``num_fields`` plus the fields of this message and all nested ones; raise IndexError if it is cut off.

    ``kind``: the message's descriptor.
    """
    if depth > _MAX_DEPTH:
        raise IndexError
    position, size = 0, len(data)
    while position < size:
        num_fields += 1
        if num_fields > MAX_FIELDS:
            raise RequestRejected(f"a message has very many fields: expected at most {MAX_FIELDS}")
        tag, position = read_varint(data, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = read_varint(data, position)
        elif wire_type == _LENGTH:
            length, position = read_varint(data, position)
            if length > size - position:
                raise IndexError
            field = kind.fields_by_number.get(tag >> 3)
            if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                num_fields = _count(data[position : position + length], field.message_type, num_fields, depth + 1)
            position += length
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:  # groups, which our messages do not use
            raise IndexError
    return num_fields


def read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the number at this position, and the position after it; raise IndexError if there is none."""
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise IndexError
