"""Which variants of a test run always, and which only with the slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow


def always(*often: str, among: Iterable[str]) -> list[Any]:
    """Parameters for each name of ``among``: those that are not ``often`` are slow ones."""
    return [pytest.param(name, marks=() if name in often else SLOW) for name in among]
