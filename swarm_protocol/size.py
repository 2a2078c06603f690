"""Sizes as users write them, such as ``2GiB``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``2GiB``, ``500MB`` or ``1.5G``. Raise ValueError if it is invalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"size {text!r} is not understood: expected a number with a unit, such as 2GiB or 500MB")
    return int(float(match[1]) * units[match[2].lower()])
