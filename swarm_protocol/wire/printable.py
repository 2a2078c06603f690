"""Escaping of untrusted text for a log line, an error message or a terminal."""

from __future__ import annotations

MAX_CHARS = 400


def printable(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return the text on one line of at most ``max_chars``: unprintable characters are escaped, long text is cut.

    Unprintable are also line breaks, the escape sequences of terminals, and marks that change the direction of writing.
    """
    shown = "".join(map(_shown, text[:max_chars]))  # the text may be long: its rest is not even looked at
    return shown if len(shown) <= max_chars and len(text) <= max_chars else shown[: max_chars - 1] + "…"


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
