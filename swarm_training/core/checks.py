"""The checks of settings, and what they say of a setting that is not valid."""

from __future__ import annotations

from collections.abc import Collection


def require(settings: object, name: str, is_valid: object, expected: str) -> None:
    """Raise ValueError unless the setting of this name is valid; ``expected`` says which values are."""
    if not is_valid:
        value = getattr(settings, name)
        raise ValueError(f"{name} is {repr(value) if isinstance(value, str) else value}: expected {expected}")


def require_one_of(settings: object, name: str, known: Collection[str]) -> None:
    require(settings, name, getattr(settings, name) in known, f"one of {', '.join(known)}")
