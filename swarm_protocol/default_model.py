"""The model that ships with the package, the default of every command."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "tiny-python-docs"
_MODELS = Path(__file__).parent / "models"


def locate(name_or_path: str) -> str:
    """The directory of a shipped model if its name was given (and no such path exists), else the argument itself."""
    shipped = _MODELS / name_or_path
    if not Path(name_or_path).exists() and name_or_path and shipped.parent == _MODELS and shipped.is_dir():
        return str(shipped)
    return name_or_path
