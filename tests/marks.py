"""Which variants of a test run always, and which only with the slow ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest

SLOW = pytest.mark.slow
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def always(*often: str, among: Iterable[str]) -> list[Any]:
    """Parameters for each name of ``among``: those that are not ``often`` are slow ones."""
    return [pytest.param(name, marks=() if name in often else SLOW) for name in among]


def in_tiers(slow: int, total: int) -> list[Any]:
    """Numbers below ``total`` as parameters of a test at length: the first ``slow`` are slow ones, all others long."""
    return [pytest.param(number, marks=SLOW if number < slow else pytest.mark.long) for number in range(total)]
