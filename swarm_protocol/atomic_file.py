"""Files that others see whole or not at all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ABANDONED_S = 3600.0  # for a partial file of this age, nobody writes it any more
PARTIAL_SUFFIX = ".partial"  # of what is still written, or was when its process ended


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """A path in the same directory to write to; it takes the place of ``path`` at the end.

    Whoever reads ``path`` meanwhile finds what was there before. If anything fails, that stays, and nothing else does.
    Several threads and processes may write the same file: the last one wins.

    Raises:
        OSError: the file cannot take its place.
    """
    partial = path.with_name(
        f".{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
    )  # processes of containers share numbers
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # unless it has taken the place


def remove_abandoned(directory: Path) -> None:
    """Partial files in the directory whose writers were killed."""
    with suppress(OSError):
        for partial in directory.glob(f".*{PARTIAL_SUFFIX}"):
            if time.time() - partial.stat().st_mtime > ABANDONED_S:
                partial.unlink()
