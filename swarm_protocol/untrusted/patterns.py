"""Regular expressions of strangers, matched by RE2 in time linear in the text.

Python's ``re`` tries one way after another, of which a short pattern can have 2**40.
"""

from __future__ import annotations

import re2

MAX_LENGTH = 1000  # of a pattern, in characters
_MAX_BYTES = 1 << 20  # of what RE2 makes of one
_MAX_SHOWN = 60  # characters of RE2's error, which may quote the whole pattern


class Pattern:
    """What ``re.compile`` gives, for patterns without backreferences and lookaround.

    ``\\d``, ``\\s`` and ``\\w`` are of ASCII, and ``$`` is the very end of the text.
    """

    def __init__(self, text: str) -> None:
        """Raises ValueError if RE2 refuses it, or it is very large."""
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters: expected at most {MAX_LENGTH}")
        options = re2.Options()
        options.log_errors, options.never_capture, options.max_mem = False, True, _MAX_BYTES
        try:
            self._compiled = re2.compile(_encodable(text), options)
        except re2.error as error:
            reason = error.args[0].decode(errors="replace")
            raise ValueError(f"{reason[:_MAX_SHOWN]!r} (expected RE2's syntax)") from None

    def match(self, text: str) -> bool:
        """Whether it is found at the beginning of the text."""
        return self._compiled.match(_encodable(text)) is not None


def _encodable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can contain."""
    return text.encode(errors="replace").decode()
