"""Text of others as it may stand in a log line, an error message or a terminal."""

from __future__ import annotations

MAX_CHARS = 400


def printable(text: str, max_chars: int = MAX_CHARS) -> str:
    """The text on one line of at most ``max_chars``: what is no character to look at is escaped, what is too long cut.

    Among those are line breaks, the escape sequences of terminals, and marks that turn the direction of writing.
    """
    shown = "".join(map(_shown, text[:max_chars]))  # whatever was sent, no more of it is looked at
    return shown if len(shown) <= max_chars and len(text) <= max_chars else shown[: max_chars - 1] + "…"


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
