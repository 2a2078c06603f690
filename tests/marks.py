"""Which variants of a test run always, which only with the slow ones, and which tests run in virtual time."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from tests.worlds.virtual_time import run_virtually

SLOW = pytest.mark.slow
LONG = pytest.mark.long
IN_VIRTUAL_TIME = pytest.mark.run_by(function=partial(run_virtually, limit_s=600.0))
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def always(*often: str, among: Iterable[str]) -> list[Any]:
    """Parameters for each name of ``among``: those that are not ``often`` are slow ones."""
    return [pytest.param(name, marks=() if name in often else SLOW) for name in among]


def in_tiers(slow: int, total: int) -> list[Any]:
    """Numbers below ``total`` as parameters of a test at length: the first ``slow`` are slow ones, all others long."""
    return [pytest.param(number, marks=SLOW if number < slow else pytest.mark.long) for number in range(total)]
