"""Families as pytest parameters: those whose blocks are made like another's are left to the slow tests."""

from __future__ import annotations

import pytest

from tests.zoo import ALIKE, SUPPORTED


def families(*but: str) -> list:
    """All but those named."""
    names = [name for name in SUPPORTED if name not in but]
    return [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in names]


FAMILIES = families()
