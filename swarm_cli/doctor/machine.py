"""The checks of this machine's memory, disk, directories and ports."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from swarm_cli.doctor.check import DoctorCheck, Finding, failed, ok, warning

_GIB = 1 << 30
_LITTLE_MEMORY, _LITTLE_DISK = 2 * _GIB, 10 * _GIB
_NO_DISK = _GIB // 2


def machine_checks(host: str | None, port: int) -> list[DoctorCheck]:
    """Return the checks; ``host`` and ``port`` are where ``swarm server`` would listen, on any address if None."""
    return [
        DoctorCheck("memory", _memory),
        DoctorCheck("directories", _directories),
        DoctorCheck("disk", _disk),
        DoctorCheck("port", lambda: [listening(host, port)]),
    ]


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if free < _LITTLE_MEMORY:
        yield warning("memory", found, "end other programs, or serve few blocks: --num-blocks, --quant int8")
    else:
        yield ok("memory", found)


def _directories() -> Iterator[Finding]:
    named = {
        "cache": (platformdirs.user_cache_path("swarm"), "XDG_CACHE_HOME"),
        "state": (platformdirs.user_state_path("swarm"), "XDG_STATE_HOME"),
        "temporary": (Path(tempfile.gettempdir()), "TMPDIR"),
    }
    for name, (path, variable) in named.items():
        yield writable(f"{name} directory", path, variable)


def writable(subject: str, path: Path, variable: str) -> Finding:
    """Return whether ``path`` can be written; ``variable`` is the environment variable that sets this path."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"x")
    except OSError as error:
        to_do = f"let this user write there, or set {variable} to a directory where it can"
        return failed(subject, f"{path} cannot be written: {error.strerror or error}", to_do)
    return ok(subject, str(path))


def hub_cache() -> Path:
    """Return the directory that holds models from the hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _disk() -> Iterator[Finding]:
    path = hub_cache()  # it is made at the first download
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / _GIB:.1f} GiB free for models in {path}"
    to_do = "make room, or set HF_HOME to a directory on another disk"
    if not os.access(existing, os.W_OK):
        yield failed("disk", f"{existing} cannot be written", "set HF_HOME to a directory that this user can write")
    elif free < _NO_DISK:
        yield failed("disk", found, to_do)
    elif free < _LITTLE_DISK:
        yield warning("disk", found, to_do)
    else:
        yield ok("disk", found)


def listening(host: str | None, port: int) -> Finding:
    where = f"port {port} of {host}" if host else f"port {port}"
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    try:
        socket.create_server((host or "", port), family=family).close()
    except OSError as error:
        to_do = "choose another --host: one of this machine's own addresses"
        if error.errno == errno.EADDRINUSE:
            to_do = "end the program that listens there, or choose another --port"
        elif error.errno in (errno.EACCES, errno.EPERM):
            to_do = "choose a --port from 1024 on"
        return failed("port", f"cannot listen on {where}: {error.strerror or error}", to_do)
    if not port:
        return ok("port", "servers can listen" + (f" on {host}" if host else "") + ", at a port that is free")
    return ok("port", f"servers can listen on {where}")
