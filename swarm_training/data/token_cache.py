"""The cache of packed tokens, a directory for each table: locked while in use, and removed once unused for long."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from swarm_protocol.file_lock import lock, try_lock

FACTS = "tokens.json"  # a directory with it is a complete table
_LOCK = ".lock"  # of the cache, and of each table; its time is that of the table's last use
_REMOVED = ".removed"  # a table that is being removed, or whose removal was interrupted
_DAYS = 30  # since a table was last opened
_logger = logging.getLogger(__name__)


@contextmanager
def table_in_use(directory: Path) -> Iterator[None]:
    """Create the directory of a table if it is missing, and keep it from being removed while the context is active."""
    with ExitStack() as held:
        try:
            with _alone_in(directory.parent):
                directory.mkdir(exist_ok=True)
                file = held.enter_context(open(directory / _LOCK, "wb"))
                os.utime(directory / _LOCK)
                try_lock(file, shared=True)
        except OSError as error:  # a file system that is read-only, or has no locks
            _logger.debug("%s is used without a lock: %s", directory, error)
        yield


def remove_unused(cache: Path) -> None:
    """Remove the tables that nobody uses and that were opened last more than 30 days ago."""
    with suppress(OSError), _alone_in(cache):
        removed = cache / _REMOVED
        shutil.rmtree(removed, ignore_errors=True)
        for directory in cache.iterdir():
            with suppress(OSError):
                if _is_old(directory) and _is_free(directory):
                    # Under its own name, a table that is removed in part would count as damaged. Windows renames no
                    # directory with an open file. Nobody opens the table meanwhile, because this process is alone.
                    directory.rename(removed)
                    shutil.rmtree(removed)
                    _logger.info("removed %s: no run has opened these tokens for %d days", directory, _DAYS)


def _is_old(directory: Path) -> bool:
    names = {entry.name: entry.stat().st_mtime for entry in os.scandir(directory)}
    is_table = FACTS in names or _LOCK in names
    return is_table and max(names.values()) < time.time() - _DAYS * 24 * 3600


def _is_free(directory: Path) -> bool:
    with open(directory / _LOCK, "ab") as file:
        return try_lock(file)


@contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Keep other processes from opening and removing tables while the context is active."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / _LOCK, "ab") as file:
        lock(file)
        yield
