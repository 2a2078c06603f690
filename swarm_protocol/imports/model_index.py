"""An on-disk cache of transformers' model index, which transformers builds by reading all its model sources twice.

That takes half a second of processor time at every start. To check that the sources are unchanged takes 15 ms.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs

from swarm_protocol.atomic_file import written_atomically
from swarm_protocol.imports.late_modules import import_by

_READER = "create_import_structure_from_path"  # of transformers.utils.import_utils
_MODELS = "models"
# {model or module: ...} at any depth; the innermost is {backends: {module: names}}
Index = dict[Any, Any]
Read = Callable[[str], Index]


def remember_models() -> None:
    """Install the cache for transformers' import; do nothing if it is imported, or reads its models in another way."""
    import_by("transformers.utils.import_utils", _with_memory)


def _with_memory(module: ModuleType, loader: Loader) -> None:
    """Run the module's code, and replace its reader by one that keeps its result on disk."""
    loader.exec_module(module)
    # The function without its decorator, a cache in memory that is too small: it holds a fifth of the entries.
    read = getattr(getattr(module, _READER, None), "__wrapped__", None)
    if read is None:
        return

    @functools.cache
    def index_of(directory: str) -> Index:
        return recalled(read, directory, [str(module.__file__)]) if Path(directory).name == _MODELS else read(directory)

    def reader(path: str | os.PathLike[str]) -> Index:
        return index_of(os.path.dirname(path) if os.path.isfile(path) else os.fspath(path))

    setattr(module, _READER, reader)


def recalled(read: Read, models: str, code: Sequence[str] = (), kept_in: Path | None = None) -> Index:
    """Return ``read(models)``, from the cache file if that was written for the same sources.

    Args:
        code: the files of the code that reads the sources; the cache is invalid once they have changed.
        kept_in: the directory of the cache file; None: in the user's cache.
    """
    file = (kept_in or platformdirs.user_cache_path("swarm") / "transformers") / f"{_MODELS}.json"
    try:
        states = [*(_state(path, os.stat(path)) for path in code), *_states(models)]
    except OSError:  # a dangling link, or a file that has just been removed
        return read(models)
    signature = hashlib.sha256("\n".join(states).encode()).hexdigest()
    with suppress(OSError, ValueError, TypeError, KeyError):  # the file is missing or damaged
        kept = json.loads(file.read_text())
        if kept["signature"] == signature:
            return dict(_decoded(kept["index"]))
    index = read(models)
    with suppress(OSError):  # such as a full disk
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(file) as partial:
            partial.write_text(json.dumps({"signature": signature, "index": _encoded(index)}))
    return index


def _states(directory: str) -> Iterator[str]:
    """Yield the state of every file below the directory."""
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if not entry.is_dir():
            yield _state(entry.path, entry.stat())
        elif entry.name != "__pycache__":
            yield from _states(entry.path)


def _state(path: str, status: os.stat_result) -> str:
    """Return a text that changes with the file; st_ctime cannot be set back by a user."""
    return f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _encoded(index: Any) -> Any:
    """Encode the index for JSON: as lists of pairs, because JSON's keys are strings, and sets by their kind."""
    if isinstance(index, dict):
        return [[_encoded(key), _encoded(value)] for key, value in index.items()]
    if isinstance(index, frozenset):
        return {"backends": sorted(index)}
    return {"names": sorted(index)} if isinstance(index, set) else index


def _decoded(index: Any) -> Any:
    if isinstance(index, list):
        return {_decoded(key): _decoded(value) for key, value in index}
    if isinstance(index, dict):
        return frozenset(index["backends"]) if "backends" in index else set(index["names"])
    return index
