"""Sizes as users write them, such as ``2GiB``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``2GiB``, ``500MB`` or ``1.5G``. Raise ValueError if it is invalid."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", text)  # a float holds every such number
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"size {text!r} is not understood: expected a number with a unit, such as 2GiB or 500MB")
    return int(float(match[1]) * unit)
