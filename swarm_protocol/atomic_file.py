"""Files that others see whole or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL_SUFFIX = ".partial"  # of what is still written, or was when its process ended
_counter = itertools.count()


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A path in the same directory to write to; it takes the place of ``path`` at the end.

    Whoever reads ``path`` meanwhile finds what was there before. If anything fails, that stays, and nothing else does.
    Several threads and processes may write the same file: the last one wins.

    Raises:
        OSError: the file cannot take its place.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{next(_counter)}{PARTIAL_SUFFIX}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
