"""Families as pytest parameters: those whose blocks are made like another's are left to the slow tests."""

from __future__ import annotations

from tests.marks import always
from tests.zoo import ALIKE, SUPPORTED


def families(*but: str) -> list:
    """All but those named."""
    names = [name for name in SUPPORTED if name not in but]
    return always(*(name for name in names if name not in ALIKE), among=names)


FAMILIES = families()
