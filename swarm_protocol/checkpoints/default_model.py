"""The model that ships with the package, the default of every command, and where other models may be."""

from __future__ import annotations

from pathlib import Path

DEFAULT_MODEL = "tiny-python-docs"
_MODELS = Path(__file__).parents[1] / "models"


def locate(name_or_path: str) -> str:
    """The directory of a shipped model if its name was given (and no such path exists), else the argument itself."""
    shipped = _MODELS / name_or_path
    if not Path(name_or_path).exists() and name_or_path and shipped.parent == _MODELS and shipped.is_dir():
        return str(shipped)
    return name_or_path


def check_location(name_or_path: str, revision: str | None = None) -> None:
    """Raises ValueError if no model can be there: what is neither a directory nor the name of a model on the hub."""
    directory = Path(name_or_path).expanduser()
    if directory.is_dir():
        if revision is not None:
            raise ValueError(f"{name_or_path} is a directory: revision {revision!r} is for models on the hub")
    elif directory.exists():
        raise ValueError(f"{name_or_path} is a file, expected the directory that holds config.json")
    elif name_or_path.startswith(("/", "./", "../", "~")) or name_or_path.count("/") > 1:
        raise ValueError(f"{name_or_path} does not exist")
