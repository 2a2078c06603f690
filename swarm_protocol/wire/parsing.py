"""Parser for untrusted messages: it refuses invalid ones, and ones that would take far more memory than their size."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from swarm_protocol.errors import RequestRejected

T = TypeVar("T", bound=Message)
MAX_FIELDS = 4096  # of one message with all nested ones; an honest request has a tenth, and an offer half at most
_SMALL_BYTES = 64 * 1024  # messages up to this size are parsed unchecked: they take at most 4 MB of memory
_VARINT, _I64, _LENGTH, _I32 = 0, 1, 2, 5  # https://protobuf.dev/programming-guides/encoding/
_FIXED_BYTES = {_I64: 8, _I32: 4}
_MAX_DEPTH = 16


def parse(kind: type[T], data: bytes, max_fields: int = MAX_FIELDS) -> T:
    """Parse a message; raise RequestRejected if the bytes are no such message, or have more than ``max_fields`` fields.

    An empty nested message takes two bytes on the wire, but a hundred once it is parsed.
    """
    try:
        if len(data) > _SMALL_BYTES:
            _count(data, 0, len(data), kind.DESCRIPTOR, 0, 0, max_fields)
        return kind.FromString(data)
    except (DecodeError, IndexError, UnicodeDecodeError):
        raise RequestRejected(f"the bytes sent are no message: expected a {kind.DESCRIPTOR.name}") from None


def _count(data: bytes, position: int, end: int, kind: Any, num_fields: int, depth: int, max_fields: int) -> int:
    """Return ``num_fields`` plus the fields of the message in ``data[position:end]`` and of all nested ones.

    Raise IndexError if a message is cut off. ``kind``: the message's descriptor.
    """
    if depth > _MAX_DEPTH:
        raise IndexError
    nested = _nested(kind)
    while position < end:
        num_fields += 1
        if num_fields > max_fields:
            raise RequestRejected(f"a message has very many fields: expected at most {max_fields}")
        tag, position = read_varint(data, position)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = read_varint(data, position)
        elif wire_type == _LENGTH:
            length, position = read_varint(data, position)
            if length > end - position:
                raise IndexError
            if (of_field := nested.get(tag >> 3)) is not None:
                num_fields = _count(data, position, position + length, of_field, num_fields, depth + 1, max_fields)
            position += length
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:  # groups, which our messages do not use
            raise IndexError
    if position > end:
        raise IndexError
    return num_fields


@cache
def _nested(kind: Any) -> dict[int, Any]:
    """Return the descriptors of the messages in a message's fields, by the number of the field."""
    fields = kind.fields_by_number.items()
    return {number: field.message_type for number, field in fields if field.type == FieldDescriptor.TYPE_MESSAGE}


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number at this position, and the position after it; raise IndexError if there is none."""
    value = shift = 0
    while (byte := data[position]) > 127 and shift < 63:  # the tenth byte is the last of a 64-bit number
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
    if byte > 127:
        raise IndexError
    return value | byte << shift, position + 1
