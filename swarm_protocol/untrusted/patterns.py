"""Untrusted regular expressions, matched by RE2 in time linear in the text.

Python's ``re`` backtracks, and a short pattern can make it try 2**40 ways.
"""

from __future__ import annotations

import re2

MAX_LENGTH = 1000  # characters of a pattern
_MAX_BYTES = 1 << 20  # memory of a compiled pattern
_MAX_SHOWN = 60  # characters of RE2's error, which may quote the whole pattern


class Pattern:
    """A compiled pattern, like the result of ``re.compile``, without backreferences and lookaround.

    ``\\d``, ``\\s`` and ``\\w`` match only ASCII, and ``$`` matches only at the very end of the text.
    """

    def __init__(self, text: str) -> None:
        """Compile the pattern; raise ValueError if RE2 refuses it, or it is very large."""
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters: expected at most {MAX_LENGTH}")
        try:
            self._compiled = re2.compile(_encodable(text), _StrangersOptions())
        except re2.error as error:
            reason = error.args[0].decode(errors="replace")
            raise ValueError(f"{reason[:_MAX_SHOWN]!r} (expected RE2's syntax)") from None

    def match(self, text: str) -> bool:
        """Return whether the pattern matches at the beginning of the text."""
        return self._compiled.match(_encodable(text)) is not None


class _StrangersOptions(re2.Options):  # type: ignore[misc]
    """RE2's options for a pattern of a stranger: errors go only to the caller, and nobody asks for groups."""

    def __init__(self) -> None:
        super().__init__()
        self.log_errors, self.never_capture, self.max_mem = False, True, _MAX_BYTES


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which JSON can contain."""
    return text.encode(errors="replace").decode()
