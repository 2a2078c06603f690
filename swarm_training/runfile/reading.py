"""The reader of run files. It requires that every key is known and of its type, and that no needed key is missing."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from swarm_protocol.untrusted.json_file import shown
from swarm_training.runfile.settings import RunFile

_MAX_BYTES = 1 << 20
_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
T = TypeVar("T")


def read_run_file(path: Path) -> RunFile:
    """Read a run file. Raises ValueError if it cannot be read or is wrong: the message names file, table and key."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        hint = f": `swarm train init {path}` writes an example" if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"cannot read the run file {path}: {error.strerror}{hint}") from None
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} is too large for a run file: expected at most {_MAX_BYTES} bytes")
    try:
        return parse_run_file(data.decode())
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: expected TOML") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: expected tables of values") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no valid TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_run_file(text: str) -> RunFile:
    """Parse the text of a run file. Raises ValueError, which names table and key."""
    content = tomllib.loads(text)
    kinds = get_type_hints(RunFile)
    _require_known(content, kinds, "the file", "table")
    tables = {}
    for name, kind in kinds.items():
        table = content.get(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{name} is {shown(table)}: expected a table [{name}]")
        tables[name] = _read_table(kind, table, name)
    return RunFile(**tables)


def _read_table(kind: type[T], table: dict[str, Any], name: str) -> T:
    types = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    _require_known(table, known, f"[{name}]", "key")
    for key, field in known.items():
        if key not in table and field.default is MISSING:
            raise ValueError(f"[{name}] has no {key}: expected {_KINDS[types[key]]}")
    values = {key: _checked(value, types[key], f"[{name}] has {key}") for key, value in table.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"[{name}] {error}") from None


def _checked(value: object, expected: type, where: str) -> object:
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ValueError(f"{where} = {shown(value)}: expected {_KINDS[expected]}")
    return value


def _require_known(found: dict[str, Any], known: Any, where: str, what: str) -> None:
    for key in found:
        if key not in known:
            raise ValueError(f"{where} has an unknown {what} {shown(key)}: expected {', '.join(known)}")
