"""The rounds of a ledger in a file to which lines are appended. Torn or damaged lines are left out; all others count.

A line is a checksum and a round in base64, so that files can be joined by ``cat``.
"""

from __future__ import annotations

import binascii
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from swarm_protocol.access.organiser import SwarmKey
from swarm_protocol.wire.printable import printable
from swarm_training.ledger.contributions import MAX_ROUND_BYTES, moment_of
from swarm_training.ledger.ledger import Ledger, LedgerLimits

_HEADER = b"# rounds of a training run, signed"
_MAX_LINE_BYTES = 2 * MAX_ROUND_BYTES
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptLedger:
    """A ledger, and the archive in which its rounds are kept; None: the ledger is in memory alone."""

    ledger: Ledger
    archive: Archive | None = None

    @classmethod
    def open(cls, path: Path | None, run: str, limits: LedgerLimits, organiser: SwarmKey | None) -> KeptLedger:
        """Restore the ledger from the file, which is created if need be. Raise ValueError as ``Archive`` does."""
        if path is None:
            return cls(Ledger(run, limits, organiser))
        archive = Archive(path)
        return cls(restored(path, run, limits, organiser), archive)


class Archive:
    """The file of one peer, or of several peers on one machine: each line is written in one piece."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raise ValueError if it is no ledger, or cannot be written."""
        self.path = path
        self._has_failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                if file.tell() == 0:
                    file.write(_HEADER + b"\n")
        except OSError as error:
            raise ValueError(f"cannot write the ledger {path}: {error.strerror}") from None
        _require_ledger(path)

    def append(self, data: bytes) -> None:
        """Append a round. If the file cannot be written, log that once and go on without the file."""
        try:
            with self.path.open("ab") as file:  # on a new line, because the last line may be torn
                file.write(b"\n" + f"{crc32(data):08x} ".encode() + b64encode(data) + b"\n")
        except OSError as error:
            if not self._has_failed:
                _logger.warning("cannot write the ledger %s: %s", self.path, error.strerror)
            self._has_failed = True


def restored(path: Path, run: str, limits: LedgerLimits, organiser: SwarmKey | None, *, is_own: bool = True) -> Ledger:
    """Return the ledger of a file, without rounds that are not valid. ``is_own``: this machine has written the file, so
    that the signatures of peers need not be checked. Raise ValueError if the file is no ledger."""
    ledger, num_wrong = Ledger(run, limits, organiser), 0
    for data in read_rounds(path, run):
        try:
            (ledger.restore if is_own else ledger.add)(data)
        except ValueError as error:
            num_wrong += 1
            level = logging.DEBUG if is_own else logging.WARNING
            _logger.log(level, "a round is left out: %s", printable(str(error)))
    if num_wrong and is_own:
        _logger.warning("%d rounds in the ledger %s are not valid, and left out", num_wrong, path)
    return ledger


def read_rounds(path: Path, run: str) -> Iterator[bytes]:
    """Yield the rounds of this run without a check of their signatures, oldest steps first. Log how many lines are
    damaged, or of another run. Raise ValueError if the file is no ledger.
    """
    _require_ledger(path)
    places, num_left_out = [], 0
    with path.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            data = _round_in(line)
            try:
                if data is not None:
                    places.append((moment_of(data, run), file.tell() - len(line)))
                elif line.strip() and line.strip() not in _HEADER:  # `in`: a header may be torn
                    num_left_out += 1
            except ValueError as error:
                num_left_out += 1
                _logger.debug("a line of %s is left out: %s", path, error)
        if num_left_out:
            _logger.warning("%d lines of %s are left out: they are damaged, or of another run", num_left_out, path)
        for _, place in sorted(places):
            file.seek(place)
            data = _round_in(file.readline(_MAX_LINE_BYTES))
            if data is not None:
                yield data


def _require_ledger(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begin = file.read(len(_HEADER)).partition(b"\n")[0]  # the header may have been torn, too
    except OSError as error:
        raise ValueError(f"cannot read the ledger {path}: {error.strerror}") from None
    if not begin or not _HEADER.startswith(begin):
        raise ValueError(f"{path} is no ledger: expected a file that `swarm train join` has written")


def _round_in(line: bytes) -> bytes | None:
    """Return the round in a line; None if there is no round, or the line is damaged."""
    try:
        data = b64decode(line[9:].rstrip(b"\n"), validate=True)
    except binascii.Error:
        return None
    return data if data and line[:9] == f"{crc32(data):08x} ".encode() else None
