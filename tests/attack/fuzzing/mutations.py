"""Changes of messages, bytes and JSON, such as no honest peer would make; each follows from the random state alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

T = TypeVar("T", bound=Message)
EVIL_TEXTS = (
    "",
    "\0",
    "a\n00:00:00 all is well \x1b[2J",
    "\u202egnp.exe",
    "x" * 600,
    "../../etc/passwd",
    "127.0.0.1:1",
    "[::1]:99999",
    "%s%n{0}",
    "𝔘" * 40,
)
_WHOLE = (
    *(0, 1, 2, 3, 7, 64, 255, 256, 4096, 2**16),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
)
_FLOATS = (0.0, -0.0, -1.0, 0.5, 1.0, 1e-45, 1e30, 3.4e38, math.inf, -math.inf, math.nan)
_KINDS = FieldDescriptor
_RANGES = {
    _KINDS.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _KINDS.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _KINDS.CPPTYPE_UINT32: (0, 2**32 - 1),
    _KINDS.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_GIVEN = 0.75  # of the changed fields are among those that an honest peer has set
_MANY = (2, 9, 100, 5000)  # of one field: some, more than is allowed, very many
_JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "auto", "1", "x" * 1000, [], {}, [[]], [1, -1], {"a": {"b": 1}}),
    *(0, -1, 1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf, math.nan),
    *(
        "/etc/passwd",
        "../model.safetensors",
        "a\0b",
        "C:\\a",
        "a\nb",
        r"((a+)+)+$",
        "torch.nn.Linear",
        "full_attention",
    ),
)


def mutated(message: T, chance: Random) -> T:
    """A copy of which one field, somewhere in it, is another."""
    changed = type(message)()
    changed.CopyFrom(message)
    holder: Message = changed
    while True:
        given = [field for field, _ in holder.ListFields()]
        field = chance.choice(given if given and chance.random() < _GIVEN else holder.DESCRIPTOR.fields or [None])
        if field is None:
            return changed
        is_inner = field.cpp_type == _KINDS.CPPTYPE_MESSAGE and not field.is_repeated
        if not (is_inner and holder.HasField(field.name) and chance.random() < 0.9):
            break
        holder = getattr(holder, field.name)
    if field.is_repeated:
        _change_repeated(holder, field, chance)
    elif field.cpp_type == _KINDS.CPPTYPE_MESSAGE:
        if chance.random() < 0.5:
            holder.ClearField(field.name)
        else:
            getattr(holder, field.name).SetInParent()
    elif chance.random() < 0.15:
        holder.ClearField(field.name)
    else:
        setattr(holder, field.name, _scalar(field, getattr(holder, field.name), chance))
    return changed


def _change_repeated(holder: Message, field: FieldDescriptor, chance: Random) -> None:
    values = getattr(holder, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(chance.choice((1, 9, 100))):
            values[chance.choice(EVIL_TEXTS) + str(chance.random())] = chance.choice(_FLOATS)
        return
    choice = chance.random()
    if choice < 0.3 and len(values):
        del values[chance.randrange(len(values))]
    elif field.message_type is not None:
        if choice < 0.7 and len(values):
            index = chance.randrange(len(values))
            values[index].CopyFrom(mutated(values[index], chance))
        else:
            message = values[0] if len(values) else None
            for _ in range(chance.choice(_MANY)):
                added = values.add()
                if message is not None:
                    added.CopyFrom(message)
    elif choice < 0.8 and len(values):
        index = chance.randrange(len(values))
        values[index] = _scalar(field, values[index], chance)
    else:
        values.extend([_scalar(field, field.default_value or _empty(field), chance)] * chance.choice(_MANY))


def _empty(field: FieldDescriptor) -> Any:
    return {_KINDS.CPPTYPE_STRING: b"" if field.type == _KINDS.TYPE_BYTES else ""}.get(field.cpp_type, 0)


def _scalar(field: FieldDescriptor, value: Any, chance: Random) -> Any:
    if field.type == _KINDS.TYPE_BYTES:
        return mutated_bytes(value, chance)
    if field.type == _KINDS.TYPE_STRING:
        return chance.choice((*EVIL_TEXTS, value[:-1], value + "x", value.upper()))
    if field.cpp_type in (_KINDS.CPPTYPE_FLOAT, _KINDS.CPPTYPE_DOUBLE):
        return chance.choice((*_FLOATS, -value))
    if field.cpp_type == _KINDS.CPPTYPE_BOOL:
        return not value
    if field.cpp_type == _KINDS.CPPTYPE_ENUM:
        return chance.choice((0, 1, 2, 3, 4, 5, 6, 7, 77, 2**31 - 1, -1))
    low, high = _RANGES[field.cpp_type]
    numbers = [*_WHOLE, *(-number for number in _WHOLE), value - 1, value + 1, 2 * value, chance.getrandbits(64)]
    return chance.choice([number for number in numbers if low <= number <= high])


def mutated_bytes(data: bytes, chance: Random) -> bytes:
    """Cut off, with other bits, with more or less in the middle, or something else altogether."""
    place = chance.randrange(len(data) + 1)
    choice = chance.randrange(8)
    if choice == 0:
        return data[:place]
    if choice == 1:
        return data[place:]
    if choice == 2:
        return data[:place] + chance.randbytes(chance.choice((1, 4, 100))) + data[place:]
    if choice == 3:
        return data[:place] + data[place + chance.choice((1, 4, 100)) :]
    if choice == 4:
        return data + data
    if choice == 5:
        return chance.randbytes(chance.choice((0, 1, 16, 32, 1000)))
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8)) if data else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def mutated_json(content: dict[str, Any], chance: Random) -> dict[str, Any]:
    """A copy in which up to three values are replaced, removed or added, wherever they are."""
    changed: dict[str, Any] = json.loads(json.dumps(content))
    for _ in range(chance.choice((1, 1, 2, 3))):
        part: Any = changed
        while part:
            key = chance.choice(list(part)) if isinstance(part, dict) else chance.randrange(len(part))
            if not isinstance(part[key], dict | list) or chance.random() < 0.3:
                break
            part = part[key]
        else:
            continue
        _json_change(chance)(part, key, chance)
    return changed


def _json_change(chance: Random) -> Callable[[Any, Any, Random], None]:
    def replace(part: Any, key: Any, chance: Random) -> None:
        part[key] = chance.choice(_JSON_VALUES)

    def remove(part: Any, key: Any, chance: Random) -> None:
        del part[key]

    def add(part: Any, key: Any, chance: Random) -> None:
        if isinstance(part, dict):
            part[chance.choice((*EVIL_TEXTS, "auto_map", "quantization_config"))] = chance.choice(_JSON_VALUES)
        else:
            part.extend([chance.choice(_JSON_VALUES)] * chance.choice((1, 100)))

    def swap(part: Any, key: Any, chance: Random) -> None:
        other = chance.choice(list(part)) if isinstance(part, dict) else chance.randrange(len(part))
        part[key], part[other] = part[other], part[key]

    return chance.choice((replace, replace, replace, remove, add, swap))
