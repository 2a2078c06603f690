"""Parser for untrusted JSON: it returns an object of bounded size and depth, or raises a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarm_protocol.errors import CheckpointError

MAX_BYTES = 16 << 20  # limit of configs; real ones have some kilobytes
MAX_DEPTH = 32  # real configs have 6
_SHOWN = 60  # characters of a wrong value


def read_object(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: the file cannot be read, is larger than ``max_bytes``, or holds something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is too large: expected at most {max_bytes} bytes of JSON")
    return parse_object(data, str(path))


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in the data; raise CheckpointError, whose message begins with ``what``."""
    try:
        content = json.loads(data.decode())
    except RecursionError:
        raise CheckpointError(f"{what} is no valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{what} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} holds a JSON {type(content).__name__}, expected an object")
    if not is_shallow(content):
        raise CheckpointError(f"{what} is nested too deeply: expected at most {MAX_DEPTH} levels of JSON")
    return content


def is_shallow(content: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Return whether no value is nested deeper than ``max_depth`` lists and objects."""
    level = [content]  # one level after the other, because a recursion could exceed Python's own limit
    for _ in range(max_depth + 1):
        containers = [value for value in level if isinstance(value, dict | list)]
        level = [value for each in containers for value in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return True
    return not any(isinstance(value, dict | list) for value in level)


def shown(value: object) -> str:
    """Return a wrong value for an error message: printable, and cut to its beginning."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
